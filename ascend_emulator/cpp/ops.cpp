// The fast path of the operator layer: a boxed kernel for every operator that needs only the common rules.
//
// The rules are those of kernels.py, which also serves all other operators (random numbers, out= arguments) and all of
// them where there is no C++ compiler: operands on one device, or an error; computed by the CPU kernel over the same
// memory; what is asked for on another device stays there; results that the schema says are written are the caller's
// own tensors; types that the NPU's kernels lack are refused; work waits for communication its stream still holds.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/nan_to_num.h>
#include <torch/library.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <vector>

extern "C" {
extern std::atomic<int> emu_pending; // of libascendcl
int emu_wait_stream(void* stream, int64_t timeout_ms);
extern int emu_saturate;
void emu_raise_float_status(int device);
}

namespace {

using torch::jit::Stack;

enum Flags : int64_t { MIXED = 1, NO_FLOAT64 = 2, SATURATES = 4, CASTS = 8 }; // as in rules.py

bool on_npu(const at::Tensor& t) {
  return t.defined() && t.device().type() == c10::DeviceType::PrivateUse1;
}

c10::Storage as_cpu(const c10::Storage& storage) {
  auto* owner = new c10::Storage(storage);
  c10::DataPtr pointer(owner->mutable_data(), owner, [](void* o) { delete static_cast<c10::Storage*>(o); }, c10::Device(c10::kCPU));
  return c10::Storage(c10::Storage::use_byte_size_t(), owner->nbytes(), std::move(pointer), nullptr, false);
}

at::Tensor as_cpu(const at::Tensor& t, c10::Storage storage) {
  auto alias = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  auto* impl = alias.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.is_conj()) alias._set_conj(true);
  if (t.is_neg()) alias._set_neg(true);
  return alias;
}

at::Tensor to_npu(const at::Tensor& t, c10::Device device) {
  if (!t.defined() || !t.device().is_cpu()) return t;
  TORCH_CHECK(t.layout() == at::kStrided, "The emulated NPU holds dense tensors only, not layout ", t.layout());
  auto out = at::empty_strided(t.sizes(), t.strides(), t.options().device(device).pinned_memory(false));
  if (!t.numel()) return out;
  if (t.is_non_overlapping_and_dense() && !t.is_conj() && !t.is_neg() && !t._is_zerotensor()) {
    std::memcpy(out.storage().mutable_data(), t.const_data_ptr(), t.nbytes());
  } else {
    as_cpu(out, as_cpu(out.storage())).copy_(t);
  }
  return out;
}

// Saturating mode: what does not fit becomes the largest number, NaN zero, and the device's flag is raised.
void clamp(const at::Tensor& t, c10::Device device) {
  if (!t.defined() || (t.scalar_type() != at::kHalf && t.scalar_type() != at::kBFloat16 && t.scalar_type() != at::kFloat)) return;
  if (at::isfinite(t).all().item<bool>()) return;
  at::nan_to_num_(const_cast<at::Tensor&>(t), 0.0);
  emu_raise_float_status(device.index());
}
void clamp(const c10::IValue& value, c10::Device device) {
  if (value.isTensor()) clamp(value.toTensor(), device);
  else if (value.isTensorList())
    for (const auto& t : value.toTensorVector()) clamp(t, device);
}

// One call: where its operands were, and what the rules say of them.
struct Call {
  const c10::FunctionSchema& schema;
  int64_t flags;
  std::optional<c10::Device> device;
  bool any_npu = false, any_cpu = false, cpu_written = false, elsewhere = false, several_types = false;
  at::ScalarType type = at::ScalarType::Undefined;
  uint64_t seen = 0; // bit per device
  // Operands that are one tensor, or share memory, do so on the CPU too: so kernels see which overlap.
  std::unordered_map<const c10::TensorImpl*, at::Tensor> aliases;
  std::unordered_map<const c10::StorageImpl*, c10::Storage> storages;

  [[noreturn]] void different(c10::Device other) const {
    if (other.is_cpu()) // the words of torch_npu
      TORCH_CHECK(false, "Expected all tensors to be on the same device. Expected NPU tensor, please check whether the input tensor "
                  "device is correct. (", schema.name(), ": ", *device, " and cpu)");
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ", other,
                "! (", schema.name(), ")");
  }

  void refuse_float64() const {
    TORCH_CHECK(false, "The operator ", schema.name(), " has no float64 kernel on NPUs.\nWhy: the matrix and vector units of Ascend "
                "compute float32, float16 and bfloat16.\nDo: use float32, or set ASCEND_EMULATOR_FLOAT64=allow.");
  }

  at::Tensor tensor(const at::Tensor& t) {
    if (!on_npu(t)) {
      any_cpu |= t.defined() && t.dim() > 0;
      return t;
    }
    if (any_npu && *device != t.device() && !(flags & MIXED)) different(t.device());
    if (flags & NO_FLOAT64 && t.scalar_type() == at::kDouble) refuse_float64();
    several_types |= any_npu && type != t.scalar_type();
    type = t.scalar_type();
    TORCH_CHECK(t.layout() == at::kStrided, "The emulated NPU holds dense tensors only, not layout ", t.layout());
    any_npu = true;
    device = t.device();
    seen |= 1ull << t.device().index();
    auto& alias = aliases[t.unsafeGetTensorImpl()];
    if (!alias.defined()) {
      auto& storage = storages[t.storage().unsafeGetStorageImpl()];
      if (!storage) storage = as_cpu(t.storage());
      alias = as_cpu(t, storage);
    }
    return alias;
  }

  void convert(c10::IValue& value) {
    if (value.isTensor()) {
      value = tensor(value.toTensor());
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& t : list) t = tensor(t);
      value = c10::List<at::Tensor>(std::move(list));
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (std::optional<at::Tensor> t : value.toOptionalTensorList()) list.push_back(t ? std::optional(tensor(*t)) : t);
      value = std::move(list);
    } else if (value.isDevice()) {
      auto asked = value.toDevice();
      if (asked.type() == c10::DeviceType::PrivateUse1) {
        device = asked;
        value = c10::Device(c10::kCPU);
      } else {
        elsewhere = true;
      }
    }
  }

  // A zero-dimensional CPU tensor may be read, but not written.
  void note_written(const c10::IValue& value) {
    if (value.isTensor()) cpu_written |= value.toTensor().defined() && !on_npu(value.toTensor());
    else if (value.isTensorList())
      for (const at::Tensor& t : value.toTensorList()) cpu_written |= !on_npu(t);
  }

  // Wait for what the current streams of all devices concerned still hold; the fast case is that nothing does.
  void drain(c10::Device result) const {
    for (int index = 0; index < 64; index++) {
      if (!(seen >> index & 1) && index != result.index()) continue;
      auto stream = c10_npu::getCurrentNPUStream(static_cast<c10::DeviceIndex>(index));
      TORCH_CHECK(emu_wait_stream(stream.stream(false), -1) != 2, "A collective on this stream failed (HCCL); the device cannot go on.");
    }
  }

  c10::Device result_device() const {
    if (any_npu && (any_cpu || cpu_written) && !(flags & MIXED)) different(c10::Device(c10::kCPU));
    if (device && device->has_index()) return *device;
    return c10::Device(c10::DeviceType::PrivateUse1, c10_npu::getCurrentNPUStream().device_index());
  }
};

class Kernel : public c10::OperatorKernel {
 public:
  Kernel(const c10::FunctionSchema& schema, int64_t flags) : flags_(flags) {
    const auto& arguments = schema.arguments();
    for (size_t i = 0; i < arguments.size(); i++)
      if (arguments[i].name() == "pin_memory") pin_ = static_cast<int>(i);
    for (size_t i = 0; i < arguments.size(); i++)
      if (arguments[i].alias_info() && arguments[i].alias_info()->isWrite()) written_.push_back(static_cast<int>(i));
    for (const auto& result : schema.returns()) {
      int place = -1;
      const auto* alias = result.alias_info();
      for (size_t i = 0; alias && alias->isWrite() && i < arguments.size(); i++) {
        const auto* other = arguments[i].alias_info();
        if (other && other->isWrite() && other->beforeSets() == alias->beforeSets()) place = static_cast<int>(i);
      }
      places_.push_back(place);
    }
  }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    const auto& schema = op.schema();
    const size_t count = schema.arguments().size(), first = stack->size() - count;
    c10::SmallVector<c10::IValue, 2> written;
    for (int place : places_) written.push_back(place < 0 ? c10::IValue() : (*stack)[first + place]);
    Call call{schema, flags_, {}};
    for (int place : written_) call.note_written((*stack)[first + place]);
    for (size_t i = 0; i < count; i++) call.convert((*stack)[first + i]);
    const auto device = call.result_device();
    if (emu_pending.load(std::memory_order_relaxed)) call.drain(device);
    if (pin_ >= 0 && !(*stack)[first + pin_].isNone()) (*stack)[first + pin_] = false;
    const bool computes = flags_ & SATURATES || (flags_ & CASTS && call.several_types);
    const bool saturating = emu_saturate && computes && !call.elsewhere;
    c10::SmallVector<c10::IValue, 2> computed;
    for (int place : written_)
      if (saturating) computed.push_back((*stack)[first + place]);
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard plain(c10::autocast_dispatch_keyset);
    op.callBoxed(stack);
    for (const auto& value : computed) clamp(value, device);
    const size_t results = stack->size() - places_.size();
    for (size_t k = 0; k < places_.size(); k++) {
      auto& value = (*stack)[results + k];
      if (saturating) clamp(value, device);
      if (places_[k] >= 0) value = written[k];
      else if (call.elsewhere) continue;
      else if (value.isTensor()) value = to_npu(value.toTensor(), device);
      else if (value.isTensorList()) {
        auto list = value.toTensorVector();
        for (auto& t : list) t = to_npu(t, device);
        value = c10::List<at::Tensor>(std::move(list));
      }
    }
  }

 private:
  int64_t flags_;
  int pin_ = -1;
  c10::SmallVector<int, 2> places_, written_;
};

std::vector<std::unique_ptr<torch::Library>> libraries; // kernels live as long as the process

} // namespace

// Register the fast path for operators of a namespace. Returns how many; a name that is not known counts as none.
extern "C" int emu_register(const char* space, const char** names, const int64_t* flags, int count) {
  auto library = std::make_unique<torch::Library>(torch::Library::IMPL, space, c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  int done = 0;
  for (int i = 0; i < count; i++) {
    std::string name = names[i], base = name.substr(0, name.find('.'));
    std::string overload = name.find('.') == std::string::npos ? "" : name.substr(name.find('.') + 1);
    auto op = c10::Dispatcher::singleton().findSchema({std::string(space) + "::" + base, overload});
    if (!op) continue;
    library->impl(names[i], torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(op->schema(), flags[i])));
    done++;
  }
  libraries.push_back(std::move(library));
  return done;
}
