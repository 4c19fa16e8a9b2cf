/* SPDX-License-Identifier: Apache-2.0
 *
 * fake_driver_body.h: the body of both fake drivers.
 *
 * Device memory is a memory file that is mapped twice: at its address nobody may read or write it, as a CPU may not
 * touch a GPU's; the fake uses the other mapping. Streams are lists of work; each look at an event carries out a little
 * of it.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fake_driver.h"

#define EXPORT __attribute__((visibility("default")))

enum {
    OK = 0,
    E_INVALID = 1,
    E_MEMORY = 2,
    E_NO_DEVICE = 100,
    E_DEVICE = 101,
    E_CONTEXT = 201,
    E_HANDLE = 400,
    E_NOT_READY = 600,
    E_REGISTERED = 712,
    E_NOT_REGISTERED = 713,
    E_CAPTURE = 900,
    MAX_OBJECTS = 4096,
    FAKE_TOTAL = 1 << 30
};

typedef struct area { /* device memory, or registered host memory */
    uintptr_t base;
    size_t bytes; /* 0: free */
    unsigned char *alias;
    int fd, device;
    bool imported, host;
} area;

typedef struct fake_event {
    bool used, pending;
    int error;
    int device;
    struct stream *on;
} fake_event;

typedef struct work {
    int kind; /* 0 copy, 1 set, 2 event */
    void *to;
    const void *from;
    size_t bytes;
    unsigned char value;
    fake_event *event;
    struct work *next;
} work;

typedef struct stream {
    bool used;
    int error, device;
    work *first, **last;
} stream;

static fake_driver fake = {
    .devices = 2, .architecture = 90, .writes_ordering = 100, .flush_options = 1, .fail_with = 999, .seed = 1};
static area areas[MAX_OBJECTS];
static stream streams[64];
static fake_event events[MAX_OBJECTS];
static pthread_mutex_t big = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local int capture_mode_now; /* 0: global */

static int program_register(void *base, size_t bytes, unsigned flags), program_unregister(void *base);

EXPORT fake_driver *fake_driver_control(void);
EXPORT fake_driver *fake_driver_control(void) {
    fake.register_host = program_register;
    fake.unregister_host = program_unregister;
    return &fake;
}

static int current_device(void); /* of the calling thread; -1: none */

static uint64_t fake_random(void) {
    uint64_t z = (fake.seed += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    return z ^ (z >> 31);
}

/* The beginning of each call that may fail. Holds the lock if it returns OK. */
static int begin(bool needs_device, bool unsafe) {
    pthread_mutex_lock(&big);
    fake.calls++;
    int error = OK;
    if (fake.fail_at > 0 && --fake.fail_at == 0) error = fake.fail_with;
    if (!error && needs_device && current_device() < 0) error = E_CONTEXT;
    if (!error && unsafe && fake.capturing && capture_mode_now != 2) {
        fake.disturbed++;
        error = E_CAPTURE;
    }
    if (error) pthread_mutex_unlock(&big);
    return error;
}

static int end(int error) {
    pthread_mutex_unlock(&big);
    return error;
}

static area *area_of(const void *address, size_t bytes, bool host) {
    const uintptr_t at = (uintptr_t)address;
    for (unsigned i = 0; i < MAX_OBJECTS; i++) {
        area *a = &areas[i];
        if (a->bytes && a->host == host && at >= a->base && at - a->base < a->bytes &&
            bytes <= a->bytes - (at - a->base))
            return a;
    }
    return NULL;
}

static area *area_new(void) {
    for (unsigned i = 0; i < MAX_OBJECTS; i++)
        if (!areas[i].bytes) return &areas[i];
    return NULL;
}

/* Where the bytes at an address are for the fake; NULL: device memory, and past its end. */
static unsigned char *bytes_at(const void *address, size_t n) {
    area *a = area_of(address, n, false);
    if (a) return a->alias + ((uintptr_t)address - a->base);
    return area_of(address, 1, false) ? NULL : (unsigned char *)(uintptr_t)address;
}

static bool map_area(area *a, int fd, size_t bytes, size_t mapped) {
    void *base = mmap(NULL, mapped, PROT_NONE, MAP_SHARED, fd, 0);
    void *alias = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED || alias == MAP_FAILED) return false;
    *a = (area){.base = (uintptr_t)base, .bytes = bytes, .alias = alias, .fd = fd, .device = current_device()};
    return true;
}

static size_t whole_pages(size_t bytes) {
    return (bytes + 4095) / 4096 * 4096;
}

static void unmap_area(area *a) {
    munmap((void *)a->base, whole_pages(a->bytes));
    munmap(a->alias, whole_pages(a->bytes));
    close(a->fd);
    *a = (area){0};
}

static int fake_alloc(void **address, size_t bytes) {
    int error = begin(true, true);
    if (error) return error;
    if (!address || !bytes) return end(E_INVALID);
    if (bytes > FAKE_TOTAL) return end(E_MEMORY);
    area *a = area_new();
    const int fd = memfd_create("fake-gpu", MFD_CLOEXEC);
    if (!a || fd < 0 || ftruncate(fd, (off_t)whole_pages(bytes)) != 0 || !map_area(a, fd, bytes, whole_pages(bytes)))
        return end(E_MEMORY);
    memset(a->alias, 0xdb, bytes); /* nobody said that it is zero */
    fake.allocations++;
    *address = (void *)a->base;
    return end(OK);
}

static int fake_range(void **base, size_t *bytes, void *address) {
    int error = begin(true, false);
    if (error) return error;
    area *a = area_of(address, 1, false);
    if (!a) a = area_of(address, 1, true);
    if (!a) return end(E_INVALID);
    *base = (void *)a->base;
    *bytes = a->bytes;
    return end(OK);
}

static int fake_pointer(void *value, int attribute, void *address) {
    int error = begin(true, false);
    if (error) return error;
    const area *a = area_of(address, 1, false);
    if (!a) a = area_of(address, 1, true);
    if (a && attribute == 3) memcpy(value, &address, sizeof address);
    if (a && attribute == 3) return end(OK);
    if (!a || (attribute != 2 && attribute != 9)) return end(E_INVALID);
    const int answer = attribute == 9 ? a->device : a->host ? 1 : 2;
    memcpy(value, &answer, sizeof answer);
    return end(OK);
}

static int fake_host_register(void *base, size_t bytes, unsigned flags) {
    int error = begin(true, true);
    if (error) return error;
    if (!base || !bytes || flags != 3) return end(E_INVALID);
    if (area_of(base, 1, true) || area_of((char *)base + bytes - 1, 1, true)) return end(E_REGISTERED);
    area *a = area_new();
    if (!a) return end(E_MEMORY);
    *a = (area){.base = (uintptr_t)base, .bytes = bytes, .host = true, .fd = -1, .device = current_device()};
    fake.registrations++;
    return end(OK);
}

static int fake_host_unregister(void *base) {
    pthread_mutex_lock(&big);
    area *a = area_of(base, 1, true);
    if (current_device() < 0 || !a || a->base != (uintptr_t)base) return end(E_NOT_REGISTERED);
    *a = (area){0};
    fake.registrations--;
    return end(OK);
}

/* Whatever the current device is. */
static int program_register(void *base, size_t bytes, unsigned flags) {
    area *a = area_new();
    if (!a || area_of(base, 1, true) || flags != 3) return E_INVALID;
    *a = (area){.base = (uintptr_t)base, .bytes = bytes, .host = true, .fd = -1};
    fake.registrations++;
    return OK;
}

static int program_unregister(void *base) {
    area *a = area_of(base, 1, true);
    if (!a || a->base != (uintptr_t)base) return E_NOT_REGISTERED;
    *a = (area){0};
    fake.registrations--;
    return OK;
}

static int fake_stream_create(void **out, unsigned flags) {
    int error = begin(true, true);
    if (error) return error;
    if (flags != 1) return end(E_INVALID);
    for (unsigned i = 0; i < sizeof streams / sizeof *streams; i++) {
        stream *s = &streams[i];
        if (s->used) continue;
        *s = (stream){.used = true, .device = current_device(), .last = &s->first};
        fake.streams++;
        *out = s;
        return end(OK);
    }
    return end(E_MEMORY);
}

static stream *stream_of(void *handle) {
    stream *s = handle;
    const bool ours = s >= streams && s < streams + sizeof streams / sizeof *streams;
    return ours && s->used && s->device == current_device() ? s : NULL;
}

static fake_event *event_of(void *handle) {
    fake_event *e = handle;
    return e >= events && e < events + MAX_OBJECTS && e->used && e->device == current_device() ? e : NULL;
}

static void carry_out(stream *s, unsigned n) {
    for (; n && s->first; n--) {
        work *w = s->first;
        if (s->error == OK && w->kind != 2) {
            unsigned char *to = bytes_at(w->to, w->bytes);
            const unsigned char *from = w->kind == 0 ? bytes_at(w->from, w->bytes) : to;
            if (!to || !from) s->error = 700;
            if (fake.break_copies) s->error = fake.break_copies, fake.break_copies = 0;
            if (s->error == OK && w->kind == 0) memmove(to, from, w->bytes);
            if (s->error == OK && w->kind == 1) memset(to, w->value, w->bytes);
        }
        if (w->event) {
            w->event->pending = false;
            w->event->error = s->error;
        }
        s->first = w->next;
        if (!s->first) s->last = &s->first;
        free(w);
    }
}

static bool works_on(const stream *s, const area *a) {
    for (const work *w = s->first; w; w = w->next)
        if ((uintptr_t)w->to - a->base < a->bytes || (uintptr_t)w->from - a->base < a->bytes) return true;
    return false;
}

static int fake_free(void *address) {
    pthread_mutex_lock(&big);
    area *a = area_of(address, 1, false);
    /* The real ones wait for all. */
    for (unsigned i = 0; i < sizeof streams / sizeof *streams && a; i++)
        if (streams[i].used && works_on(&streams[i], a)) carry_out(&streams[i], UINT32_MAX);
    if (current_device() < 0 || !a || a->imported || a->base != (uintptr_t)address) return end(E_INVALID);
    unmap_area(a);
    fake.allocations--;
    return end(OK);
}

static int append(void *handle, work what, bool touches_memory) {
    stream *s = stream_of(handle);
    if (!s) return E_HANDLE;
    if (s->error) return s->error;
    if (touches_memory) {
        unsigned char *to = bytes_at(what.to, what.bytes);
        const unsigned char *from = what.kind == 0 ? bytes_at(what.from, what.bytes) : to;
        if (!to || !from || !what.bytes) return E_INVALID;
        if (to == (unsigned char *)what.to && !area_of(what.to, what.bytes, true)) fake.unpinned++;
        if (what.kind == 0 && from == (const unsigned char *)what.from && !area_of(what.from, what.bytes, true))
            fake.unpinned++;
    }
    work *w = malloc(sizeof *w);
    if (!w) return E_MEMORY;
    *w = what;
    w->next = NULL;
    *s->last = w;
    s->last = &w->next;
    return OK;
}

static int fake_copy(void *to, const void *from, size_t bytes, void *handle) {
    int error = begin(true, false);
    if (error) return error;
    return end(append(handle, (work){.to = to, .from = from, .bytes = bytes}, true));
}

static int fake_set(void *to, unsigned char value, size_t bytes, void *handle) {
    int error = begin(true, false);
    if (error) return error;
    return end(append(handle, (work){.kind = 1, .to = to, .value = value, .bytes = bytes}, true));
}

static int fake_stream_synchronize(void *handle) {
    int error = begin(true, true);
    if (error) return error;
    stream *s = stream_of(handle);
    if (!s) return end(E_HANDLE);
    carry_out(s, UINT32_MAX);
    return end(s->error);
}

static int fake_stream_destroy(void *handle) {
    pthread_mutex_lock(&big);
    stream *s = stream_of(handle);
    if (!s) return end(E_HANDLE);
    carry_out(s, UINT32_MAX);
    s->used = false;
    fake.streams--;
    return end(OK);
}

static int fake_event_create(void **out) {
    int error = begin(true, true);
    if (error) return error;
    for (unsigned i = 0; i < MAX_OBJECTS; i++) {
        if (events[i].used) continue;
        events[i] = (fake_event){.used = true, .device = current_device()};
        fake.events++;
        *out = &events[i];
        return end(OK);
    }
    return end(E_MEMORY);
}

static int fake_event_destroy(void *handle) {
    pthread_mutex_lock(&big);
    fake_event *e = event_of(handle);
    if (!e) return end(E_HANDLE);
    if (e->pending) carry_out(e->on, UINT32_MAX);
    e->used = false;
    fake.events--;
    return end(OK);
}

static int fake_event_record(void *handle, void *on) {
    int error = begin(true, false);
    if (error) return error;
    fake_event *e = event_of(handle);
    if (!e) return end(E_HANDLE);
    error = append(on, (work){.kind = 2, .event = e}, false);
    if (error == OK) {
        e->pending = true;
        e->on = on;
    }
    return end(error);
}

static int fake_event_query(void *handle) {
    int error = begin(true, true);
    if (error) return error;
    fake_event *e = event_of(handle);
    if (!e) return end(E_HANDLE);
    if (e->pending && !fake.stalled) carry_out(e->on, (unsigned)(fake_random() % 5));
    return end(e->pending ? E_NOT_READY : e->error);
}

/* A handle names a descriptor of this process, which others open through /proc. */
typedef struct fake_handle {
    char magic[8];
    int32_t pid, fd;
    uint64_t bytes;
    char rest[40];
} fake_handle;
_Static_assert(sizeof(fake_handle) == 64, "as large as a real one");

static int fake_ipc_export(fake_handle *handle, void *base) {
    int error = begin(true, true);
    if (error) return error;
    const area *a = area_of(base, 1, false);
    if (!a || a->imported || a->base != (uintptr_t)base) return end(E_INVALID);
    *handle = (fake_handle){.magic = "fakeipc", .pid = getpid(), .fd = a->fd, .bytes = a->bytes};
    return end(OK);
}

static int fake_ipc_open(void **address, fake_handle handle, unsigned flags) {
    int error = begin(true, true);
    if (error) return error;
    char path[64];
    if (memcmp(handle.magic, "fakeipc", 8) != 0 || flags != 1 || !handle.bytes || handle.bytes > FAKE_TOTAL)
        return end(E_INVALID);
    if (handle.pid == getpid()) return end(E_CONTEXT);
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.pid, handle.fd);
    area *a = area_new();
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    struct stat file;
    if (!a || fd < 0 || fstat(fd, &file) != 0 || (uint64_t)file.st_size < handle.bytes ||
        !map_area(a, fd, handle.bytes, whole_pages(handle.bytes))) {
        if (fd >= 0) close(fd);
        return end(E_INVALID);
    }
    a->imported = true;
    fake.imports++;
    *address = (void *)a->base;
    return end(OK);
}

static int fake_ipc_close(void *address) {
    pthread_mutex_lock(&big);
    area *a = area_of(address, 1, false);
    if (current_device() < 0 || !a || !a->imported || a->base != (uintptr_t)address) return end(E_INVALID);
    unmap_area(a);
    fake.imports--;
    return end(OK);
}

static int fake_capture_mode(int *mode) {
    const int before = capture_mode_now;
    if (!mode || *mode < 0 || *mode > 2) return E_INVALID;
    capture_mode_now = *mode;
    *mode = before;
    return OK;
}

#if !FAKE_OLD
static int fake_dmabuf(void *handle, void *address, size_t bytes, int type, unsigned long long flags) {
    int error = begin(true, false);
    if (error) return error;
    const area *a = area_of(address, bytes, false);
    if (!a || type != 1 || flags) return end(E_INVALID);
    const int fd = fcntl(a->fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) return end(999);
    memcpy(handle, &fd, sizeof fd);
    return end(OK);
}
#endif

static int fake_init(unsigned flags) {
    int error = begin(false, false);
    return error ? error : end(flags ? E_INVALID : fake.devices ? OK : E_NO_DEVICE);
}

static int fake_count(int *count) {
    int error = begin(false, false);
    if (error) return error;
    *count = fake.devices;
    return end(OK);
}

static int fake_device(int device) {
    int error = begin(false, false);
    if (error) return error;
    if (device < 0 || device >= fake.devices) return end(E_DEVICE);
    return OK; /* holding the lock */
}

static int fake_text(char *text, int bytes, int device, const char *what) {
    int error = fake_device(device);
    if (error) return error;
    snprintf(text, (size_t)bytes, "%s", what);
    return end(OK);
}

static int fake_memory(size_t *bytes, int device) {
    int error = fake_device(device);
    if (error) return error;
    *bytes = FAKE_TOTAL;
    return end(OK);
}

static int fake_version(int *version, int value) {
    int error = begin(false, false);
    if (error) return error;
    *version = value;
    return end(OK);
}
