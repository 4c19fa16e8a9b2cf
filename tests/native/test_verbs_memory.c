/* SPDX-License-Identifier: Apache-2.0
 *
 * test_verbs_memory.c: registration over libibverbs: what is refused is refused there, with each try and what would
 * make it work (MEM-1); what is registered in pieces is one region.
 */
#include "verbs_table.h"

#include <sys/resource.h>

#define MIB (1u << 20)

/* The kernel's page, as the backends hear of it; 0: as it is. */
static long page_bytes;
long __sysconf(int name); /* the C library's own, by its other name */
__attribute__((visibility("default"))) long sysconf(int name);
long sysconf(int name) {
    return name == _SC_PAGESIZE && page_bytes ? page_bytes : __sysconf(name);
}

static uccl_ep_status register_heap(node *n, uccl_ep_memory memory) {
    const uccl_ep_status status = n->table->region_register(n->device, UCCL_EP_REGION_HEAP, &memory);
    if (status == UCCL_EP_OK) n->table->region_deregister(n->device, UCCL_EP_REGION_HEAP);
    return status;
}

static uccl_ep_status register_on(const char *devices, const char *options, uccl_ep_memory memory) {
    fake_machine(devices);
    node n;
    node_open(&n, 0, "connectx", NULL, options);
    const uccl_ep_status status = register_heap(&n, memory);
    node_close(&n);
    return status;
}

/* Memory as a GPU has it: the CPU may not touch it, and a descriptor stands for it. */
static uccl_ep_memory device_memory(uint64_t bytes, uint32_t kind) {
    const int fd = memfd_create("device", MFD_CLOEXEC);
    CHECK(fd >= 0 && !ftruncate(fd, (off_t)bytes), "%s", strerror(errno));
    void *base = mmap(NULL, bytes, PROT_NONE, MAP_SHARED, fd, 0);
    CHECK(base != MAP_FAILED, "%s", strerror(errno));
    uccl_ep_memory memory = host_memory(base, bytes);
    memory.kind = kind;
    memory.dmabuf_fd = fd;
    return memory;
}

/* G3: dmabuf, then by address; both fail: each with its errno, and what is missing. */
static void two_ways(void) {
    uccl_ep_memory gpu = device_memory(64 * 1024, UCCL_EP_MEMORY_CUDA), rocm = gpu;
    rocm.kind = UCCL_EP_MEMORY_ROCM;
    WORKS(register_on("mlx5_0", "", gpu));
    WORKS(register_on("mlx5_0,reg_errno=0,peermem=0", "", gpu));
    WORKS(register_on("mlx5_0,dmabuf_errno=95,peermem=1", "", gpu));
    WORKS(register_on("mlx5_0,peermem=1", "dmabuf=0", gpu));
    REFUSED(register_on("mlx5_0,dmabuf_errno=95", "", gpu), UCCL_EP_E_REGISTRATION,
            "as a dmabuf|errno 95|by its address|errno 14|nvidia_peermem");
    REFUSED(register_on("mlx5_0,dmabuf_errno=95", "", rocm), UCCL_EP_E_REGISTRATION, "errno 95|errno 14|amdgpu");
    REFUSED(register_on("mlx5_0", "dmabuf=0", gpu), UCCL_EP_E_REGISTRATION, "by its address|errno 14|nvidia_peermem");
    char options[256];
    snprintf(options, sizeof(options), "library=%s/fake_verbs_old/libibverbs.so.1", UCCL_EP_TEST_LIBRARY_DIR);
    REFUSED(register_on("mlx5_0", options, gpu), UCCL_EP_E_REGISTRATION, "ibv_reg_dmabuf_mr|rdma-core 34|errno 14");
    munmap(gpu.base, gpu.bytes);
    close(gpu.dmabuf_fd);
    check_nothing_left();
}

/* A heap inside an allocation, given as a dmabuf of all of it: bytes land where the heap says. */
static void inside_a_dmabuf(void) {
    fake_machine("mlx5_0;mlx5_1");
    const uint64_t offsets[] = {0, 4096, 4104, 65560};
    for (unsigned i = 0; i < 2 * sizeof(offsets) / sizeof(offsets[0]); i++) {
        const uint64_t offset = offsets[i / 2];
        const uccl_ep_memory whole = device_memory(MIB, UCCL_EP_MEMORY_CUDA);
        unsigned char *seen = mmap(NULL, MIB, PROT_READ | PROT_WRITE, MAP_SHARED, whole.dmabuf_fd, 0);
        static unsigned char source[8192];
        uccl_ep_memory heap = whole;
        /* Its address may lie in its page as it does in the dmabuf's, or otherwise. */
        heap.base = (char *)whole.base + offset + i % 2 * 40;
        heap.bytes = 8192;
        heap.dmabuf_offset = offset;
        node a, b;
        node_open(&a, 0, "connectx", "mlx5_0", "");
        node_open(&b, 1, "connectx", "mlx5_1", "");
        const uccl_ep_memory own = host_memory(source, sizeof(source));
        WORKS(a.table->region_register(a.device, UCCL_EP_REGION_HEAP, &own));
        WORKS(b.table->region_register(b.device, UCCL_EP_REGION_HEAP, &heap));
        node_endpoint(&a);
        node_endpoint(&b);
        nodes_join(&a, &b);
        memset(source, 0x41 + (int)i, sizeof(source));
        CHECK_EQ(node_write(&a, 1, 16, 0, 8).status, UCCL_EP_OK);
        CHECK_EQ(node_write(&a, 1, 0, 8192 - 100, 100).status, UCCL_EP_OK);
        const unsigned char *at = seen + offset;
        CHECK(at[0] == 0x41 + i && at[7] == 0x41 + i && !at[8] && !at[8192 - 101] && at[8192 - 100] == 0x41 + i &&
                  at[8191] == 0x41 + i && !at[8192] && (!offset || !at[-1]),
              "the heap at offset %llu", (unsigned long long)offset);
        node_close(&a);
        node_close(&b);
        munmap(seen, MIB);
        munmap(whole.base, MIB);
        close(whole.dmabuf_fd);
    }
    check_nothing_left();
}

/* Pages of 64 KiB, as some kernels for aarch64 have: address and offset share more than the low 12 bits. */
static void large_pages(void) {
    const uccl_ep_memory whole = device_memory(4 * 65536, UCCL_EP_MEMORY_CUDA);
    page_bytes = 65536;
    for (unsigned i = 0; i < 16; i++) {
        uccl_ep_memory heap = whole;
        heap.base = (char *)whole.base + 65536 + i * 4096;
        heap.dmabuf_offset = 65536;
        heap.bytes = 65536;
        WORKS(register_on("mlx5_0,page=0x10000", "", heap));
    }
    REFUSED(register_on("mlx5_0,page=0x10000,max_mr_size=0x8000", "", whole), UCCL_EP_E_REGISTRATION, "register less");
    page_bytes = 0;
    munmap(whole.base, whole.bytes);
    close(whole.dmabuf_fd);
    check_nothing_left();
}

/* G5, G11: any pointer and length inside an allocation; what is no memory is refused. */
static void pointers(void) {
    unsigned char *page = mmap(NULL, 3 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    WORKS(register_on("mlx5_0", "", host_memory(page + 0x200, 100)));
    WORKS(register_on("mlx5_0", "", host_memory(page + 4095, 2)));
    REFUSED(register_on("mlx5_0", "", host_memory(page, 0)), UCCL_EP_E_REGISTRATION, "no memory");
    REFUSED(register_on("mlx5_0", "", host_memory(NULL, 100)), UCCL_EP_E_REGISTRATION, "no memory");
    REFUSED(register_on("mlx5_0", "", host_memory(page, 1ull << 40)), UCCL_EP_E_REGISTRATION, "errno 14|hole");
    REFUSED(register_on("mlx5_0", "", host_memory(page, UINT64_MAX)), UCCL_EP_E_REGISTRATION, "");
    mprotect(page + 4096, 4096, PROT_READ);
    REFUSED(register_on("mlx5_0", "", host_memory(page, 3 * 4096)), UCCL_EP_E_REGISTRATION, "read-only");
    uccl_ep_memory source = host_memory(page, 3 * 4096);
    source.access = UCCL_EP_ACCESS_LOCAL_READ;
    WORKS(register_on("mlx5_0", "", source)); /* to be read it need not be writable */
    munmap(page, 3 * 4096);
    check_nothing_left();
}

static void locked_memory(void) {
    static char heap[MIB];
    const struct rlimit limit = {8 << 20, 8 << 20};
    CHECK_EQ(setrlimit(RLIMIT_MEMLOCK, &limit), 0);
    REFUSED(register_on("mlx5_0,memlock=65536", "", host_memory(heap, sizeof(heap))), UCCL_EP_E_REGISTRATION,
            "errno 12|ulimit -l");
    check_nothing_left();
}

/* C5: the right to atomics is not asked of a NIC that has none. */
static void no_atomics(void) {
    static char heap[8192];
    fake_machine("ionic_0");
    node n;
    node_open(&n, 0, "pollara", NULL, "");
    uccl_ep_memory memory = host_memory(heap, sizeof(heap));
    WORKS(register_heap(&n, memory));
    memory.access |= UCCL_EP_ACCESS_REMOTE_ATOMIC;
    REFUSED(register_heap(&n, memory), UCCL_EP_E_REGISTRATION, "atomic_cap NONE");
    CHECK(!(n.caps.flags & UCCL_EP_CAP_ATOMIC_ADD64), "it promises adds");
    node_close(&n);
    check_nothing_left();
}

/* A region in pieces: operations across their borders, in and out, at both ends different ones. */
static void pieces(void) {
    static unsigned char heap[2][MIB], expected[MIB];
    const uint32_t bytes = 600000;
    fake_machine("mlx5_0,max_mr_size=0x10000;mlx5_1,max_mr_size=0x6000");
    node a, b;
    node_open(&a, 0, "connectx", "mlx5_0", "inline=0");
    node_open(&b, 1, "connectx", "mlx5_1", "inline=0");
    node *both[2] = {&a, &b};
    REFUSED(register_heap(&b, host_memory(heap[1], 65 * 16384)), UCCL_EP_E_REGISTRATION, "mlx5_1|register less");
    for (unsigned k = 0; k < 2; k++) {
        const uccl_ep_memory memory = host_memory(heap[k] + 8, bytes); /* not where a page begins */
        WORKS(both[k]->table->region_register(both[k]->device, UCCL_EP_REGION_HEAP, &memory));
        node_endpoint(both[k]);
    }
    nodes_join(&a, &b);
    test_rng rng = test_rng_at(1);
    for (unsigned i = 0; i < MIB; i++) heap[0][i] = (unsigned char)test_random(&rng);
    for (uint64_t i = 0, n = test_scaled(2000); i < n; i++) {
        const uint32_t length = (uint32_t)(1 + test_below(&rng, i % 4 ? 300 : 16384));
        uint64_t from = test_below(&rng, bytes - length), to = test_below(&rng, bytes - length);
        if (i % 3 == 0) from = (1 + test_below(&rng, 8)) * 65536 - test_below(&rng, length) - 1; /* across a border */
        if (i % 5 == 0) to = (1 + test_below(&rng, 30)) * 16384 - test_below(&rng, length) - 1;
        if (from > bytes - length) from = bytes - length;
        if (to > bytes - length) to = bytes - length;
        CHECK_EQ(node_write(&a, 1, from, to, length).status, UCCL_EP_OK);
        memcpy(expected + 8 + to, heap[0] + 8 + from, length);
    }
    CHECK(memcmp(expected, heap[1], MIB) == 0, "the bytes of %u, or one beside them", bytes);
    /* Beyond its end it is refused, and nothing of it is written. */
    uint32_t accepted = 1;
    const uccl_ep_operation beyond = {.kind = UCCL_EP_OPERATION_WRITE,
                                      .flags = UCCL_EP_OPERATION_SIGNALLED,
                                      .length = 64,
                                      .remote_offset = bytes - 63};
    CHECK(a.table->submit(a.endpoint, 1, &beyond, 1, 0, &accepted) < 0 && !accepted, "beyond the region");
    node_close(&a);
    node_close(&b);
    check_nothing_left();
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 60);
    two_ways();
    inside_a_dmabuf();
    large_pages();
    pointers();
    no_atomics();
    pieces();
    locked_memory();
    return test_end();
}
