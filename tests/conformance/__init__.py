# SPDX-License-Identifier: Apache-2.0
"""The cases of the conformance suite, one module a group of clauses. Installed as uccl_ep.conformance.cases."""
