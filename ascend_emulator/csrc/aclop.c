/* The few operators that torch_npu starts by itself, past torch's dispatcher: casts, fills, copies and pads around collectives.
 *
 * Any other fails and is named: an operator that did nothing would leave zeros where a result is expected.
 */
#include <stdlib.h>
#include <string.h>

#include "emu.h"

#define MAX_DIMS 16
enum { F32 = 0, F16 = 1, I8 = 2, I32 = 3, U8 = 4, I16 = 6, U16 = 7, U32 = 8, I64 = 9, U64 = 10, F64 = 11, BOOL = 12, BF16 = 27 };

typedef struct {
  int type, dims, format, placement;
  int64_t size[MAX_DIMS];
} TensorDesc;

typedef struct {
  void *address;
  size_t bytes;
} DataBuffer;

TensorDesc *aclCreateTensorDesc(int type, int dims, const int64_t *size, int format) {
  if (dims > MAX_DIMS) return NULL;
  TensorDesc *t = calloc(1, sizeof *t);
  t->type = type, t->dims = dims, t->format = format;
  for (int i = 0; i < dims; i++) t->size[i] = size[i];
  return t;
}
void aclDestroyTensorDesc(const TensorDesc *t) { free((void *)t); }
int aclSetTensorShape(TensorDesc *t, int dims, const int64_t *size) { return EMU_OK; } /* storage shape: dense here */
int aclSetTensorFormat(TensorDesc *t, int format) { return EMU_OK; }
void aclSetTensorDescName(TensorDesc *t, const char *name) {}
int aclSetTensorPlaceMent(TensorDesc *t, int placement) {
  t->placement = placement;
  return EMU_OK;
}
int aclSetTensorConst(TensorDesc *t, void *data, size_t bytes) { return EMU_OK; } /* the value comes as an input too */
int aclGetTensorDescType(const TensorDesc *t) { return t->type; }
int aclGetTensorDescFormat(const TensorDesc *t) { return t->format; }
size_t aclGetTensorDescNumDims(const TensorDesc *t) { return (size_t)t->dims; }
int aclGetTensorDescDimV2(const TensorDesc *t, size_t index, int64_t *value) {
  if (index >= (size_t)t->dims) return EMU_INVALID_PARAM;
  *value = t->size[index];
  return EMU_OK;
}

DataBuffer *aclCreateDataBuffer(void *address, size_t bytes) {
  DataBuffer *b = malloc(sizeof *b);
  *b = (DataBuffer){address, bytes};
  return b;
}
int aclDestroyDataBuffer(const DataBuffer *b) {
  free((void *)b);
  return EMU_OK;
}
void *aclGetDataBufferAddr(const DataBuffer *b) { return b->address; }

/* Attributes matter to none of the operators below. */
void *aclopCreateAttr(void) { return calloc(1, 1); }
void aclopDestroyAttr(const void *attributes) { free((void *)attributes); }
#define SET_ATTRIBUTE(name, type) \
  int aclopSetAttr##name(void *attributes, const char *key, type value) { return EMU_OK; }
#define SET_ATTRIBUTE_LIST(name, type) \
  int aclopSetAttr##name(void *attributes, const char *key, int count, const type *values) { return EMU_OK; }
SET_ATTRIBUTE(Bool, uint8_t)
SET_ATTRIBUTE(DataType, int)
SET_ATTRIBUTE(Float, float)
SET_ATTRIBUTE(Int, int64_t)
SET_ATTRIBUTE(String, const char *)
SET_ATTRIBUTE_LIST(ListBool, uint8_t)
SET_ATTRIBUTE_LIST(ListDataType, int)
SET_ATTRIBUTE_LIST(ListFloat, float)
SET_ATTRIBUTE_LIST(ListInt, int64_t)
SET_ATTRIBUTE_LIST(ListString, char *)
int aclopSetAttrListListInt(void *attributes, const char *key, int lists, const int *counts, const int64_t *const *values) {
  return EMU_OK;
}

static size_t width(int type) {
  switch (type) {
    case I8: case U8: case BOOL: return 1;
    case F16: case BF16: case I16: case U16: return 2;
    case F32: case I32: case U32: return 4;
    case I64: case U64: case F64: return 8;
  }
  return 0;
}

static double load(const void *data, int type, size_t i) {
  switch (type) {
    case F32: return ((const float *)data)[i];
    case F64: return ((const double *)data)[i];
    case I8: return ((const int8_t *)data)[i];
    case U8: return ((const uint8_t *)data)[i];
    case BOOL: return ((const uint8_t *)data)[i] != 0;
    case I16: return ((const int16_t *)data)[i];
    case U16: return ((const uint16_t *)data)[i];
    case I32: return ((const int32_t *)data)[i];
    case U32: return ((const uint32_t *)data)[i];
    case I64: return (double)((const int64_t *)data)[i];
    case U64: return (double)((const uint64_t *)data)[i];
    case F16: return (double)((const _Float16 *)data)[i];
  }
  uint32_t bits = (uint32_t)((const uint16_t *)data)[i] << 16; /* BF16 */
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static void store(void *data, int type, size_t i, double value) {
  switch (type) {
    case F32: ((float *)data)[i] = (float)value; return;
    case F64: ((double *)data)[i] = value; return;
    case I8: ((int8_t *)data)[i] = (int8_t)value; return;
    case U8: ((uint8_t *)data)[i] = (uint8_t)value; return;
    case BOOL: ((uint8_t *)data)[i] = value != 0; return;
    case I16: ((int16_t *)data)[i] = (int16_t)value; return;
    case U16: ((uint16_t *)data)[i] = (uint16_t)value; return;
    case I32: ((int32_t *)data)[i] = (int32_t)value; return;
    case U32: ((uint32_t *)data)[i] = (uint32_t)value; return;
    case I64: ((int64_t *)data)[i] = (int64_t)value; return;
    case U64: ((uint64_t *)data)[i] = (uint64_t)value; return;
    case F16: ((_Float16 *)data)[i] = (_Float16)value; return;
  }
  float narrow = (float)value;
  uint32_t bits;
  memcpy(&bits, &narrow, 4);
  bits = narrow != narrow ? 0x7fc00000u : bits + 0x7fffu + ((bits >> 16) & 1u); /* round to nearest even */
  ((uint16_t *)data)[i] = (uint16_t)(bits >> 16);
}

static size_t count(const TensorDesc *t) {
  size_t n = 1;
  for (int i = 0; i < t->dims; i++) n *= (size_t)t->size[i];
  return n;
}

static int integer(int type) { return type != F32 && type != F64 && type != F16 && type != BF16; }

static void cast(const TensorDesc *in, const void *from, const TensorDesc *out, void *to) {
  size_t n = count(in);
  int wide = (in->type == I64 || in->type == U64) && integer(out->type); /* a double would lose low bits */
  for (size_t i = 0; i < n; i++) {
    if (wide && (out->type == I64 || out->type == U64)) ((int64_t *)to)[i] = ((const int64_t *)from)[i];
    else if (wide && out->type != BOOL) store(to, out->type, i, (double)(int32_t)((const int64_t *)from)[i]);
    else store(to, out->type, i, load(from, in->type, i));
  }
}

static void pad(const TensorDesc *in, const void *from, const void *paddings, int padding_type, double fill, const TensorDesc *out, void *to) {
  size_t bytes = width(in->type), n = count(in), total = count(out);
  for (size_t i = 0; i < total; i++) store(to, out->type, i, fill);
  for (size_t i = 0; i < n; i++) {
    size_t rest = i, place = 0, stride = 1;
    for (int d = in->dims - 1; d >= 0; d--) {
      size_t at = rest % (size_t)in->size[d];
      rest /= (size_t)in->size[d];
      place += (at + (size_t)load(paddings, padding_type, 2 * (size_t)d)) * stride;
      stride *= (size_t)out->size[d];
    }
    memcpy((char *)to + place * bytes, (const char *)from + i * bytes, bytes);
  }
}

int aclopCompileAndExecute(const char *op, int inputs, TensorDesc **in, DataBuffer **from, int outputs, TensorDesc **out,
                           DataBuffer **to, void *attributes, int engine, int compile, const char *path, EmuStream *stream) {
  if (stream) emu_wait_stream(stream, -1);
  int known = 1;
  for (int i = 0; i < inputs; i++) known &= width(in[i]->type) > 0;
  for (int i = 0; i < outputs; i++) known &= width(out[i]->type) > 0;
  if (known && outputs == 1) {
    if (!strcmp(op, "Cast") && inputs >= 1) return cast(in[0], from[0]->address, out[0], to[0]->address), EMU_OK;
    if (!strcmp(op, "Identity") && inputs == 1 && in[0]->type == out[0]->type && from[0]->bytes == to[0]->bytes)
      return memmove(to[0]->address, from[0]->address, from[0]->bytes), EMU_OK;
    if (!strcmp(op, "Fill") && inputs == 2) {
      double value = load(from[1]->address, in[1]->type, 0);
      for (size_t i = 0, n = count(out[0]); i < n; i++) store(to[0]->address, out[0]->type, i, value);
      return EMU_OK;
    }
    if ((!strcmp(op, "Pad") || !strcmp(op, "PadV3")) && inputs >= 2 && in[0]->dims == out[0]->dims) {
      double fill = inputs > 2 ? load(from[2]->address, in[2]->type, 0) : 0;
      pad(in[0], from[0]->address, from[1]->address, in[1]->type, fill, out[0], to[0]->address);
      return EMU_OK;
    }
  }
  emu_fail("the operator '%s' is started by torch_npu itself and is not emulated", op);
  return EMU_OP_NOT_FOUND;
}
int aclopCompileAndExecuteV2(const char *op, int inputs, TensorDesc **in, DataBuffer **from, int outputs, TensorDesc **out,
                             DataBuffer **to, void *attributes, int engine, int compile, const char *path, EmuStream *stream) {
  return aclopCompileAndExecute(op, inputs, in, from, outputs, out, to, attributes, engine, compile, path, stream);
}
