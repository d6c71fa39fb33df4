"""Memory of one rank of many, held to figures that others published or assert on real GPUs."""

from __future__ import annotations

import pytest

from benchmarks import many_gpus


@pytest.mark.filterwarnings("ignore:.torch.jit")  # in torch.distributed.optim
def test_a_rank_of_ddp_holds_what_pytorchs_recipe_printed() -> None:
    rows = [*many_gpus.check_zero_tutorial(False), *many_gpus.check_zero_tutorial(True)]
    assert len(rows) == 8
    assert all(abs(row.error) < 0.003 for row in rows), rows


@pytest.mark.parametrize("reshard", [True, False])
def test_a_rank_of_fsdp_stays_below_the_bounds_of_pytorchs_test(reshard: bool) -> None:
    forward, backward, optimizer, after = many_gpus.check_fsdp_test(reshard)
    assert backward.error < 0
    assert optimizer.error < 0.002  # the allocator's rounding
    assert after.error < 0
    if reshard:
        assert forward.error < 0
    else:  # the all-gather of the block before is still held: the bound does not count it
        block_bytes = 4 * 7_084_800
        assert forward.predicted - block_bytes < forward.published


@pytest.mark.parametrize(
    ("gpus", "gib", "error"),
    [(8, 82.4, 0.0), pytest.param(128, 67.0, 0.006, marks=pytest.mark.slow)],
)
def test_a_rank_of_torchtitans_llama_reserves_what_was_published(
    gpus: int, gib: float, error: float
) -> None:
    default, expandable = many_gpus.check_torchtitan(gpus, gib)
    assert default.error == pytest.approx(error, abs=0.001)
    assert expandable.error == pytest.approx(-0.03, abs=0.01)


@pytest.mark.slow
def test_a_rank_of_fine_tuning_holds_what_was_published() -> None:
    (mistral,) = many_gpus.check_fine_tuning("mistral", 2, 4096, 36_225_939_968)
    assert abs(mistral.error) < 0.0005
    (santacoder,) = many_gpus.check_fine_tuning("santacoder", 2, 2048, 5_716_304_896)
    assert abs(santacoder.error) < 0.0005
