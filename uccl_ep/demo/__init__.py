# SPDX-License-Identifier: Apache-2.0
"""`uccl-ep demo`: expert-parallel dispatch and combine between processes, compared bit by bit with numpy.

routing.py says which token goes to which expert, tokens.py what is in a token and what an expert makes of it,
exchange.py moves the rows, traffic.py is who posts them, the CPU or a kernel, worker.py is one rank, driver.py starts
the ranks and collects what they say, cli.py is the command.
"""
