/* Reductions, always in rank order, so that every rank gets the same bits; 16-bit floats accumulate in float. */
#include <string.h>

#include "hccl.h"

/* HcclDataType: int8 int16 int32 fp16 fp32 int64 uint64 uint8 uint16 uint32 fp64 bf16 int128 */
static const size_t widths[] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2, 16};
size_t hccl_width(int type) { return type >= 0 && type < 13 ? widths[type] : 0; }

enum { SUM = 0, PROD = 1, MAX = 2, MIN = 3 };

static float half_to_float(uint16_t bits) {
  _Float16 value;
  memcpy(&value, &bits, 2);
  return (float)value;
}
static uint16_t float_to_half(float value) {
  _Float16 half = (_Float16)value;
  uint16_t bits;
  memcpy(&bits, &half, 2);
  return bits;
}
static float bf16_to_float(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}
static uint16_t float_to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if (value != value) return 0x7fc0;
  return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16); /* round to nearest even */
}

#define SAME(x) (x)
/* A NaN wins in MAX and MIN. */
#define LARGER(a, b) ((a) != (a) || (a) > (b) ? (a) : (b))
#define SMALLER(a, b) ((a) != (a) || (a) < (b) ? (a) : (b))
#define REDUCE(T, ACC, LOAD, STORE)                                             \
  for (size_t i = 0; i < count; i++) {                                          \
    ACC total = LOAD(((const T *)parts[0])[i]);                                 \
    for (int r = 1; r < ranks; r++) {                                           \
      ACC next = LOAD(((const T *)parts[r])[i]);                                \
      total = op == SUM    ? (ACC)(total + next)                                \
              : op == PROD ? (ACC)(total * next)                                \
              : op == MAX  ? LARGER(total, next)                                \
                           : SMALLER(total, next);                              \
    }                                                                           \
    ((T *)out)[i] = STORE(total);                                               \
  }                                                                             \
  return HCCL_OK

int hccl_reduce(void *out, void **parts, int ranks, size_t count, int type, int op) {
  if (op < SUM || op > MIN) return HCCL_NOT_SUPPORT;
  switch (type) {
    case 0: REDUCE(int8_t, int8_t, SAME, SAME);
    case 1: REDUCE(int16_t, int16_t, SAME, SAME);
    case 2: REDUCE(int32_t, int32_t, SAME, SAME);
    case 3: REDUCE(uint16_t, float, half_to_float, float_to_half);
    case 4: REDUCE(float, float, SAME, SAME);
    case 5: REDUCE(int64_t, int64_t, SAME, SAME);
    case 11: REDUCE(uint16_t, float, bf16_to_float, float_to_bf16);
  }
  emu_fail("HCCL cannot reduce data type %d", type); /* unsigned and 64-bit floats, as on Ascend 910B */
  return HCCL_NOT_SUPPORT;
}
