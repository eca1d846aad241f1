"""The calls that compute-sanitizer watches (tools/gpu_gates/short_set.py): right results, and few launches."""

import pytest
from gpu_gates import short_set
from helpers.cuda_counts import Operations
from helpers.devices import BACKENDS

# Not Triton's interpreter, which would take minutes.
UNDER_TEST = [where for where in BACKENDS if where[0] == "emulated" or (where[1] == "cuda" and where[0] != "reference")]


@pytest.mark.parametrize("where", UNDER_TEST, ids="-".join, indirect=True)
def test_results_are_those_of_the_cpu_from_few_operations(where: tuple[str, str]) -> None:
    """On a GPU, tensors are large enough for its blocks to read many tiles each, and its warps several tensors.

    So they are for the emulated devices, which have fewer blocks.
    """
    backend, device = where
    with Operations() as operations:
        short_set.run([backend], device, *(() if device == "cuda" else (1 << 20,)))
    # Those of the comparisons on the CPU included. The reference alone would take 55 for each of thousands of tensors.
    assert len(operations.names) < 8000
