/* The part of libnvidia-ml.so.1 that is asked: one H200, structures as in NVIDIA's header.
 *
 * STUB_COUNT    how many GPUs (1)
 * STUB_MIG      1: the GPU is split
 * STUB_FAIL     "function=code": that function answers with this status
 * STUB_NAMELESS set: processes are there, their memory is not told (as in a container)
 */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define INSUFFICIENT_SIZE 7

static int status(const char *function)
{
    const char *fail = getenv("STUB_FAIL");
    size_t length = strlen(function);
    return fail && !strncmp(fail, function, length) && fail[length] == '=' ? atoi(fail + length + 1) : 0;
}

static unsigned number(const char *name, unsigned otherwise)
{
    const char *text = getenv(name);
    return text ? (unsigned)atoi(text) : otherwise;
}

typedef struct { char legacy[16]; unsigned domain, bus, device, device_id, subsystem_id; char bus_id[32]; } pci_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_t;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } process_t;

int nvmlInitWithFlags(unsigned flags) { return status("nvmlInitWithFlags"); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 3 ? "Not Supported" : "Insufficient Permissions"; }

int nvmlDeviceGetCount_v2(unsigned *count)
{
    *count = number("STUB_COUNT", 1);
    return status("nvmlDeviceGetCount_v2");
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device)
{
    *device = (void *)0x7f0000001000;
    return status("nvmlDeviceGetHandleByIndex_v2");
}

int nvmlDeviceGetPciInfo_v3(void *device, pci_t *pci)
{
    snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:0A:00.0");
    return status("nvmlDeviceGetPciInfo_v3");
}

int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length)
{
    snprintf(uuid, length, "GPU-11111111-2222-3333-4444-555555555555");
    return status("nvmlDeviceGetUUID");
}

int nvmlDeviceGetName(void *device, char *name, unsigned length)
{
    snprintf(name, length, "NVIDIA H200");
    return status("nvmlDeviceGetName");
}

int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending)
{
    *current = *pending = number("STUB_MIG", 0);
    return status("nvmlDeviceGetMigMode");
}

int nvmlDeviceGetMemoryInfo_v2(void *device, memory_t *memory)
{
    if (memory->version != 0x02000028)
        return 25;
    memory->total = 150754820096ull;
    memory->reserved = 600ull << 20;
    memory->used = 5ull << 30;
    memory->free = memory->total - memory->reserved - memory->used;
    return status("nvmlDeviceGetMemoryInfo_v2");
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, process_t *processes)
{
    if (!processes) {
        *count = 1;
        return INSUFFICIENT_SIZE;
    }
    *count = 1;
    processes[0].pid = 4242;
    processes[0].used = getenv("STUB_NAMELESS") ? ~0ull : 4ull << 30;
    return status("nvmlDeviceGetComputeRunningProcesses_v3");
}
