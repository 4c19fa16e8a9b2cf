# SPDX-License-Identifier: Apache-2.0
"""Broken NICs and broken cores, one clause each: does the suite notice?

registry   which mutants there are
worker     runs cases on one of them, in a process of its own
runner     all of them: kills, baselines, the score
cli        `uccl-ep mutants`
"""
