"""What the processor can do, by the system's list of its instructions."""

from types import SimpleNamespace

import pytest

from linrope.utils.machine import mkl_lacks_avx512, multiplies_bfloat16

X86 = "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx512f {} avx512vbmi\nbugs\t\t: none\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd {} i8mm\nCPU part\t: 0xd40\n"


@pytest.mark.parametrize(
    ("text", "native"),
    [
        (X86.format("avx512_bf16"), True),
        (X86.format("amx_bf16"), True),
        (X86.format("avx512_vnni"), False),
        (ARM.format("bf16"), True),
        (ARM.format("sve"), False),
        ("", False),
    ],
)
def test_products_of_bfloat16_are_found_in_the_list_of_instructions(text, native, monkeypatch):
    monkeypatch.setattr("linrope.utils.machine.sys.platform", "linux")
    monkeypatch.setattr("linrope.utils.machine.Path.read_text", lambda path, encoding: text)
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: True)
    assert multiplies_bfloat16() is native
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: False)
    assert multiplies_bfloat16() is False


@pytest.mark.parametrize(("said", "native"), [(b"1\n", True), (b"0\n", False), (b"", False)])
def test_macos_is_asked_by_sysctl(said, native, monkeypatch):
    monkeypatch.setattr("linrope.utils.machine.sys.platform", "darwin")
    monkeypatch.setattr("linrope.utils.machine.subprocess.run", lambda *_, **__: SimpleNamespace(stdout=said))
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: True)
    assert multiplies_bfloat16() is native


def test_a_system_without_a_list_has_none(monkeypatch):
    def missing(path, encoding):
        raise FileNotFoundError

    monkeypatch.setattr("linrope.utils.machine.sys.platform", "win32")
    monkeypatch.setattr("linrope.utils.machine.Path.read_text", missing)
    assert multiplies_bfloat16() is False


@pytest.mark.parametrize(
    ("vendor", "capability", "mkl", "lacks"),
    [
        ("AuthenticAMD", "AVX512", True, True),
        ("GenuineIntel", "AVX512", True, False),
        ("AuthenticAMD", "AVX2", True, False),
        ("AuthenticAMD", "AVX512", False, False),
    ],
)
def test_mkl_uses_avx512_on_processors_of_intel_only(vendor, capability, mkl, lacks, monkeypatch):
    text = f"processor\t: 0\nvendor_id\t: {vendor}\n"
    monkeypatch.setattr("linrope.utils.machine.Path.read_text", lambda path, encoding: text)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    monkeypatch.setattr("torch.backends.mkl.is_available", lambda: mkl)
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: True)
    assert mkl_lacks_avx512() is lacks
