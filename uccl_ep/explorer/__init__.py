# SPDX-License-Identifier: Apache-2.0
"""Is what was seen allowed? The model of the contract, and litmus programs explored over virtual NICs."""
