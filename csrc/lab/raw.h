/* SPDX-License-Identifier: Apache-2.0
 *
 * raw.h: system calls of the lab's own. The C library's functions of these names are preload.c's and netlink.c's here:
 * they take lab_lock where a number is that of a device, or was when the program closed it in a way that nobody saw,
 * and who calls from inside the lab holds that lock.
 *
 * As the C library's: -1 and errno.
 */
#ifndef UCCL_EP_LAB_RAW_H
#define UCCL_EP_LAB_RAW_H

#include <fcntl.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

static inline int raw_close(int fd) {
    return (int)syscall(SYS_close, fd);
}
static inline ssize_t raw_write(int fd, const void *bytes, size_t n) {
    return syscall(SYS_write, fd, bytes, n);
}
static inline int raw_fcntl(int fd, int command, long argument) {
    return (int)syscall(SYS_fcntl, fd, command, argument);
}
static inline int raw_ioctl(int fd, unsigned long request, void *argument) {
    return (int)syscall(SYS_ioctl, fd, request, argument);
}
static inline ssize_t raw_send(int fd, const void *bytes, size_t n, int flags) {
    return syscall(SYS_sendto, fd, bytes, n, flags, NULL, 0);
}
/* On machines of 64 bits the offset is in bytes. */
static inline void *raw_mmap(size_t bytes, int protection, int flags, int fd, off_t offset) {
    return (void *)syscall(SYS_mmap, NULL, bytes, protection, flags, fd, offset);
}

#endif
