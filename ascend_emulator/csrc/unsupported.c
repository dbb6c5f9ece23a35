/* Functions that must exist for torch_npu to load, and that nothing here implements: each fails and says its name. */
#include "emu.h"

#define UNSUPPORTED(name)                                           \
  int name(void) {                                                  \
    emu_fail("the emulated CANN does not implement " #name);        \
    return EMU_NOT_SUPPORTED;                                       \
  }

UNSUPPORTED(aclmdlInitDump)
UNSUPPORTED(aclmdlSetDump)
UNSUPPORTED(aclmdlFinalizeDump)
UNSUPPORTED(aclrtBinaryGetFunction)
UNSUPPORTED(aclrtBinaryLoadFromData)
UNSUPPORTED(aclrtGetFunctionAddr)
UNSUPPORTED(aclrtGetDeviceUtilizationRate)
UNSUPPORTED(rtDevBinaryRegister)
UNSUPPORTED(rtFunctionRegister)
UNSUPPORTED(rtGetC2cCtrlAddr)
UNSUPPORTED(rtKernelLaunch)
