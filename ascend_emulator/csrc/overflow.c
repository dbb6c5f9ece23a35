/* What becomes of values that do not fit: infinity, or the largest number and a status flag of the device.
 *
 * torch_npu chooses the mode when a device is set up: INF_NAN_MODE_ENABLE, INF_NAN_MODE_FORCE_DISABLE and the SoC.
 * The operator layer reads emu_saturate and raises the flag; npu_get_float_status reads it.
 */
#include "emu.h"

int emu_saturate; /* 1: saturating mode */
static _Atomic int status[EMU_MAX_DEVICES];

int aclrtSetDeviceSatMode(int mode) { /* ACL_RT_OVERFLOW_MODE_SATURATION 0, _INFNAN 1 */
  if (mode != 0 && mode != 1) {
    emu_fail("aclrtSetDeviceSatMode: %d is no overflow mode", mode);
    return EMU_INVALID_PARAM;
  }
  emu_saturate = mode == 0;
  return EMU_OK;
}
int aclrtGetDeviceSatMode(int *mode) {
  *mode = emu_saturate ? 0 : 1;
  return EMU_OK;
}

void emu_raise_float_status(int device) {
  if (device >= 0 && device < EMU_MAX_DEVICES) status[device] = 1;
}
int emu_float_status(int device) { return device >= 0 && device < EMU_MAX_DEVICES ? status[device] : 0; }
void emu_clear_float_status(int device) {
  if (device >= 0 && device < EMU_MAX_DEVICES) status[device] = 0;
}

/* Whether a stream's overflow is looked for at all. */
int aclrtSetStreamOverflowSwitch(EmuStream *s, uint32_t flag) {
  if (s) s->overflow = (int)flag;
  return EMU_OK;
}
int aclrtGetStreamOverflowSwitch(EmuStream *s, uint32_t *flag) {
  *flag = s ? (uint32_t)s->overflow : 0;
  return EMU_OK;
}
