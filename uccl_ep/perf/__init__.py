# SPDX-License-Identifier: Apache-2.0
"""`uccl-ep perf`: what the proxy costs, and what puts cost beside memcpy. docs/performance.md explains the figures.

bench.py runs the C program that measures, proxy.py and shm.py say what is measured and show it, conditions.py what must
be known of the machine to compare figures, cli.py is the command.

Of `perf gpu`: drain.py is the CPU's side of rings that kernels post to, gpu.py what is measured with it,
gpu_campaign.py how much of it, gpu_tables.py shows it, against.py runs another benchmark beside it.
"""
