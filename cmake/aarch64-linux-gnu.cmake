# SPDX-License-Identifier: Apache-2.0
#
# Cross-build with Debian's gcc-aarch64-linux-gnu; ctest runs what it built under qemu-user.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
# Headers that are the same on every machine (infiniband/verbs.h), behind those of the target's own C library.
set(CMAKE_C_FLAGS_INIT "-idirafter /usr/include")
find_program(UCCL_EP_QEMU NAMES qemu-aarch64 qemu-aarch64-static)
if(UCCL_EP_QEMU)
    set(CMAKE_CROSSCOMPILING_EMULATOR ${UCCL_EP_QEMU};-L;/usr/aarch64-linux-gnu)
endif()
