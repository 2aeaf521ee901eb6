"""Each constant of the kernel is measured as it stands, halved and doubled; it stands again afterwards."""

from benchmarks.speed import block_sizes
from linrope.ops.torch_kernel import plan


def test_every_setting_is_measured_and_undone(capsys):
    block_sizes.BlockSizes.main(["--length", "200", "--repeats", "1"])
    shown = capsys.readouterr().out
    for value in (32, 64, 128, 2**17, 2**18, 2**19):
        assert f" {value:,} " in shown
    assert (plan.CHUNK, plan.BLOCK_ELEMENTS) == (64, 2**18)
