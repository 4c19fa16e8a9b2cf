/* SPDX-License-Identifier: Apache-2.0
 *
 * test_verbs_nearest.c: which of several NICs is taken when none is named: the one with the fewest bridges to the GPU;
 * where there is none, or it is not known where it lies, one of the NUMA node; never one that cannot be used; and what
 * is named is taken wherever it is.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <sched.h>
#include <sys/stat.h>

#include "uccl_ep/backend.h"
#include "verbs_ranks.h"

static char tree[] = "/tmp/uccl_ep-sysfs-XXXXXX";

static void folder(const char *path) {
    char command[PATH_MAX];
    snprintf(command, sizeof command, "%s/%s", tree, path);
    for (char *p = command + 1; *p; p++) {
        if (*p != '/') continue;
        *p = 0;
        mkdir(command, 0700);
        *p = '/';
    }
    CHECK(!mkdir(command, 0700) || errno == EEXIST, "%s", command);
}

static void text_file(const char *path, const char *text) {
    char name[PATH_MAX];
    snprintf(name, sizeof name, "%s/%s", tree, path);
    FILE *file = fopen(name, "w");
    CHECK(file && fputs(text, file) >= 0 && !fclose(file), "%s", name);
}

static void link_to(const char *from, const char *to) {
    char name[PATH_MAX], target[PATH_MAX];
    snprintf(name, sizeof name, "%s/%s", tree, from);
    snprintf(target, sizeof target, "%s/%s", tree, to);
    CHECK(!symlink(target, name), "%s", name);
}

/* A PCI device, and the NIC that it is. */
static void device(const char *bridges, const char *address, const char *nic, const char *node) {
    char place[256], name[300];
    snprintf(place, sizeof place, "devices/%s/%s", bridges, address);
    folder(place);
    snprintf(name, sizeof name, "bus/pci/devices/%s", address);
    link_to(name, place);
    if (!nic) return;
    snprintf(name, sizeof name, "%s/numa_node", place);
    text_file(name, node);
    snprintf(name, sizeof name, "class/infiniband/%s", nic);
    folder(name);
    snprintf(name, sizeof name, "class/infiniband/%s/device", nic);
    link_to(name, place);
}

static uccl_ep_status host_fail(void *context, uccl_ep_status status, int32_t code, const char *text) {
    (void)context;
    (void)code;
    printf("%s: %s\n", uccl_ep_status_name(status), text);
    return status;
}
static void host_log(void *context, uccl_ep_log_level level, const char *text) {
    (void)context;
    (void)level;
    (void)text;
}

/* What is opened for a GPU at this address (NULL: without one). */
static void expect(const char *machine, const char *gpu, int32_t node, const char *name, const char *expected) {
    uccl_ep_gpu_info info = {.size = sizeof info, .numa_node = node, .memory_kind = UCCL_EP_MEMORY_CUDA};
    snprintf(info.address, sizeof info.address, "%s", gpu ? gpu : "");
    const uccl_ep_host host = {.size = sizeof host,
                               .abi_major = UCCL_EP_BACKEND_ABI_MAJOR,
                               .abi_minor = UCCL_EP_BACKEND_ABI_MINOR,
                               .log = host_log,
                               .fail = host_fail,
                               .gpu_info = gpu ? &info : NULL};
    void *library = dlopen(BACKEND("connectx"), RTLD_NOW | RTLD_LOCAL);
    CHECK(library, "%s", dlerror());
    union {
        void *symbol;
        const uccl_ep_backend *(*function)(void);
    } entry = {.symbol = dlsym(library, UCCL_EP_BACKEND_ENTRY)};
    const uccl_ep_backend *backend = entry.function();
    fake_machine(machine);
    uccl_ep_device *opened;
    uccl_ep_caps caps = {.size = sizeof caps};
    uccl_ep_device_info found = {.size = sizeof found};
    CHECK_EQ(backend->device_open(&host, name, "", &opened, &caps), UCCL_EP_OK);
    CHECK_EQ(backend->opened(opened, &found), UCCL_EP_OK);
    CHECK(!strcmp(found.name, expected), "GPU at %s: %s was opened, and %s is nearer", gpu ? gpu : "none", found.name,
          expected);
    backend->device_close(opened);
    check_nothing_left();
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 60);
    CHECK(mkdtemp(tree), "mkdtemp");
    folder("bus/pci/devices");
    folder("class/infiniband");
    /* Two sockets; below the first one a switch with a GPU and a NIC, and a NIC beside it. */
    device("pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0", "0000:03:00.0", NULL, NULL);
    device("pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:01.0", "0000:04:00.0", "mlx5_1", "0");
    device("pci0000:00/0000:00:02.0", "0000:05:00.0", "mlx5_0", "0");
    device("pci0000:80/0000:80:01.0", "0000:81:00.0", "mlx5_2", "1");
    device("pci0000:80/0000:80:02.0", "0000:82:00.0", NULL, NULL);
    CHECK(!setenv("SYSFS_PATH", tree, 1), "setenv");
    const char *machine = "mlx5_0;mlx5_1;mlx5_2";
    expect(machine, "0000:03:00.0", 0, NULL, "mlx5_1");
    expect(machine, "0000:03:00.0", 0, "mlx5_2", "mlx5_2");
    expect(machine, "0000:82:00.0", 1, NULL, "mlx5_2");
    expect(machine, "0000:82:00.0", -1, NULL, "mlx5_2");
    /* The same switch, but that NIC is down. */
    expect("mlx5_0;mlx5_1,state=1;mlx5_2", "0000:03:00.0", 0, NULL, "mlx5_0");
    /* Letters of an address, as some drivers write them. */
    device("pci0000:c0/0000:c0:01.0", "0000:ca:00.0", NULL, NULL);
    device("pci0000:c0/0000:c0:02.0", "0000:cb:00.0", "mlx5_3", "1");
    expect("mlx5_0;mlx5_1;mlx5_3", "0000:CA:00.0", 1, NULL, "mlx5_3");
    /* Where the GPU lies is not known but for its node. */
    expect(machine, "0000:99:00.0", 1, NULL, "mlx5_2");
    expect(machine, "", 0, NULL, "mlx5_0");
    /* No GPU: the node of the thread, which is one of the first socket where there is one alone. */
    unsigned cpu, node;
    if (!getcpu(&cpu, &node) && node == 0) expect("mlx5_2;mlx5_1", NULL, -1, NULL, "mlx5_1");
    /* An OEM's card: its chip tells whose it is. */
    device("pci0000:c0/0000:c0:03.0", "0000:cc:00.0", "mlx5_4", "1");
    text_file("devices/pci0000:c0/0000:c0:03.0/0000:cc:00.0/vendor", "0x15b3\n");
    expect("mlx5_4,vendor=0x1234", NULL, -1, "mlx5_4", "mlx5_4");
    char command[PATH_MAX];
    snprintf(command, sizeof command, "rm -rf '%s'", tree);
    CHECK_EQ(system(command), 0);
    return test_end();
}
