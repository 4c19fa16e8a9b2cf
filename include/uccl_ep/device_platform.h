/* SPDX-License-Identifier: Apache-2.0
 *
 * device_platform.h: what device.h asks of a platform, once for CUDA, HIP and the CPU's emulation. C++14; under a
 * run-time compiler nothing is included but our own headers.
 *
 * A kernel in one source for all of them:
 *
 *   UCCL_EP_KERNEL void scale(double *x, uccl_ep_u64 n, double by) {
 *       using namespace uccl_ep::platform;
 *       for (uccl_ep_u64 i = thread(); i < n; i += threads()) x[i] *= by;
 *   }
 *
 *   UCCL_EP_KERNEL    a kernel with C linkage
 *   UCCL_EP_DEVICE    a function, or a member, that kernels call
 *   UCCL_EP_SHARED    before a variable of a kernel: one a block, not initialised. Its type has no constructor.
 *   UCCL_EP_EMULATION_ENTRY(kernel)   defines uccl_ep_call_KERNEL, by which the emulation calls it, and
 *                     uccl_ep_sizes_KERNEL, the sizes of its arguments; nothing elsewhere. uccl_ep.accel adds it
 * itself.
 *
 * Each platform's header defines these, in namespace uccl_ep::platform:
 *
 *   Where am I: lane(), width() of the warp; thread(), threads() of the block, counted through all its dimensions;
 *   block(), blocks() of the grid; present(): the lanes that the warp has (the last one of a block may have fewer).
 *
 *   Memory. X_block, X_device and X_system are scopes: all threads of the block; of the device; and the CPU and other
 *   devices, too. Loads and stores without "acquire" or "release" are relaxed, that is atomic and unordered, and so are
 *   add, or and exchange. What X_block touches are words of 32 bits in shared memory.
 *       load_constant(address)   of device memory that nobody changes while the kernel runs
 *       load_system, load_device (also of 32 bits), load_acquire_system, load_acquire_device, load_acquire_block
 *       load_pair_system(address, &second)   acquire; two adjacent words, 16-byte aligned; the second is read no
 *                           earlier than the first, which is returned
 *       store_system, store_release_system, store_release_device, store_block, store_release_block
 *       add_device, exchange_device, add_block, or_block
 *       fence_block()       acquire and release, for the block
 *       fence_system()      acquire and release: what this thread read before it comes before all that it does after
 *                           it, and all that it did, or synchronised with, before comes before what it stores after it
 *       store_command(slot, word0, word1)   both words of a ring's slot, relaxed, in one instruction where there is one
 *
 *   Lanes. A mask has bit i for lane i. Those whose bit is set call together and with the same mask; they wait for each
 *   other, and sync_warp orders memory among them.
 *       active()            lanes that happen to be here together, the caller among them: any subset of those that
 *                           are on their way, and never more than those that go on together from here
 *       shuffle(mask, value, from), ballot(mask, predicate), sync_warp(mask)
 *       sync_block()        all threads of the block that have not returned; orders memory
 *
 *   lowest_bit(mask), count_bits(mask): of 64 bits, not all of them zero for the first.
 *   clock()   ticks that grow at one rate on the whole device (uccl_ep_gpu_info.clock_hz). For deadlines.
 *   cycles()  the finest counter that this multiprocessor has, at a rate that nobody promises. For measurements.
 *   relax()   a turn of a wait. Every loop that waits for memory calls it.
 *   turns_host, turns_device, turns_shared   turns of a wait that reads host memory, device memory or shared memory
 *             before it looks at its deadline and at what else ends it
 *   breath()  what a command takes to the CPU and its answer to host memory, less what a read of that takes to arrive;
 *             nothing where nobody has measured it
 *   dynamic_shared()   the shared memory that the launch asked for, 16-byte aligned
 */
#ifndef UCCL_EP_DEVICE_PLATFORM_H
#define UCCL_EP_DEVICE_PLATFORM_H

#ifndef __cplusplus
#error "device_platform.h is C++: compile kernels with nvcc, NVRTC, hipcc, hiprtc or a C++ compiler"
#endif

#include "device_comm.h"

#if defined(__HIP__) || defined(__HIPCC__) || defined(__HIPCC_RTC__)
#include "device_hip.h"
#elif defined(__CUDACC__) || defined(__CUDACC_RTC__)
#include "device_cuda.h"
#else
#include "device_emulation.h"
#endif

#endif
