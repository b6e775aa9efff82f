// A stand-in for libnvidia-ml.so.1: one GPU, of which each call tells the next state. Only what the trainer asks for.
#include <string.h>

static unsigned asked;

int nvmlInitWithFlags(unsigned flags) { return 0; }

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    *device = &asked;
    return strcmp(uuid, "GPU-1") ? 6 : 0;  // NVML_ERROR_NOT_FOUND
}

int nvmlDeviceGetClockInfo(void *device, int type, unsigned *mhz) {
    *mhz = type == 1 ? 1500 + 100 * (asked++ % 2) : 0;  // 1 is NVML_CLOCK_SM
    return 0;
}

int nvmlDeviceGetMaxClockInfo(void *device, int type, unsigned *mhz) {
    *mhz = 1980;
    return 0;
}

int nvmlDeviceGetCurrentClocksEventReasons(void *device, unsigned long long *reasons) {
    *reasons = asked % 2 ? 0x44 : 0x05;  // power limit always; hardware's temperature, or an idle GPU
    return 0;
}

int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *millijoules) {
    static unsigned long long total = 1ull << 33;
    *millijoules = total += 6000;
    return 0;
}

#ifdef WITH_ECC
int nvmlDeviceGetTotalEccErrors(void *device, int kind, int counter, unsigned long long *errors) {
    static unsigned long long total = 5;
    *errors = kind == 1 && counter == 0 ? total++ : 99;  // uncorrected, since the driver was loaded
    return 0;
}
#endif
