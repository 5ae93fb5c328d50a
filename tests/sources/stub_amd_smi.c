/* The part of libamd_smi.so that is asked: two MI300X, layouts as in ROCm 7.0. Every other symbol that the Python
 * package binds at import is appended by the test as a function that answers NOT_SUPPORTED.
 *
 * STUB_FAMILY   first number of the version (26)
 * STUB_COUNT    how many GPUs (2)
 * STUB_FAIL     "function=code": that function answers with this status
 * STUB_HIDDEN   set: the UUID of a library that may not open the render node
 * STUB_HANG, STUB_CRASH, STUB_CHATTER   a function that never returns, dies of SIGSEGV, prints 8 MiB to stdout
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int status(const char *function)
{
    const char *fail = getenv("STUB_FAIL"), *hang = getenv("STUB_HANG"), *crash = getenv("STUB_CRASH");
    const char *chatter = getenv("STUB_CHATTER");
    size_t length = strlen(function);
    if (hang && !strcmp(hang, function))
        for (;;)
            pause();
    if (crash && !strcmp(crash, function))
        *(volatile int *)0 = 1;
    if (chatter && !strcmp(chatter, function))
        for (int line = 0; line < 8 * 1024; line++)
            printf("%1023d\n", line);
    if (fail && !strncmp(fail, function, length) && fail[length] == '=')
        return atoi(fail + length + 1);
    return 0;
}

static int number(const char *name, int otherwise)
{
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}

typedef struct { uint32_t major, minor, release; const char *build; } version_t;
typedef struct { uint32_t drm_render, drm_card, hsa_id, hip_id; char hip_uuid[256]; } enumeration_t;

int amdsmi_init(uint64_t flags)
{
    return flags == 2 ? status("amdsmi_init") : 1;
}

int amdsmi_shut_down(void)
{
    return status("amdsmi_shut_down");
}

int amdsmi_get_lib_version(version_t *version)
{
    version->major = number("STUB_FAMILY", 26);
    version->minor = 0;
    version->release = 2;
    version->build = "stub";
    return status("amdsmi_get_lib_version");
}

int amdsmi_get_socket_handles(uint32_t *count, void **sockets)
{
    uint32_t there = number("STUB_COUNT", 2);
    for (uint32_t i = 0; sockets && i < there; i++)
        sockets[i] = (void *)(uintptr_t)(0x7f0000001000 + i);
    *count = there;
    return status("amdsmi_get_socket_handles");
}

int amdsmi_get_processor_handles(void *socket, uint32_t *count, void **processors)
{
    if (processors)
        processors[0] = (void *)((uintptr_t)socket + 0x1000);
    *count = 1;
    return status("amdsmi_get_processor_handles");
}

static int index_of(void *processor)
{
    return (int)((uintptr_t)processor - 0x7f0000002000);
}

int amdsmi_get_gpu_memory_total(void *processor, int type, uint64_t *bytes)
{
    *bytes = type == 0 ? 206141652992u : 1;
    return status("amdsmi_get_gpu_memory_total");
}

int amdsmi_get_gpu_memory_usage(void *processor, int type, uint64_t *bytes)
{
    *bytes = type == 0 ? (index_of(processor) ? 1345323008u : 296747008u) : 1;
    return status("amdsmi_get_gpu_memory_usage");
}

int amdsmi_get_gpu_device_bdf(void *processor, uint64_t *bdf)
{
    *bdf = (uint64_t)(index_of(processor) ? 0x15 : 0x05) << 8;
    return status("amdsmi_get_gpu_device_bdf");
}

int amdsmi_get_gpu_device_uuid(void *processor, uint32_t *length, char *uuid)
{
    const char *hidden = getenv("STUB_HIDDEN");
    snprintf(uuid, *length, hidden ? "ffff0000-0000-1000-80ff-ffffffffffff" : "a1ff74a1-0000-1000-80b2-c3d4e5f607%02x",
             index_of(processor));
    return status("amdsmi_get_gpu_device_uuid");
}

int amdsmi_get_gpu_enumeration_info(void *processor, enumeration_t *info)
{
    memset(info, 0, sizeof *info);
    info->drm_render = 128 + index_of(processor);
    snprintf(info->hip_uuid, sizeof info->hip_uuid, "GPU-a1b2c3d4e5f607%02x", index_of(processor));
    return status("amdsmi_get_gpu_enumeration_info");
}
