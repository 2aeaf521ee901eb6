"""What the processor can do, by the system's list of its instructions."""

from types import SimpleNamespace

import pytest

from linrope.utils.machine import has_fast_bfloat16, mkl_lacks_avx512

X86 = "processor\t: 0\nvendor_id\t: {}\nflags\t\t: fpu avx512f {} avx512vbmi\nbugs\t\t: none\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd {} i8mm\nCPU part\t: 0xd40\n"


@pytest.mark.parametrize(
    ("text", "native"),
    [
        (X86.format("AuthenticAMD", "avx512_bf16"), True),
        (X86.format("AuthenticAMD", "avx512_vnni"), False),
        (X86.format("GenuineIntel", "avx512_bf16"), False),
        (X86.format("GenuineIntel", "amx_bf16 avx512_bf16"), True),
        (ARM.format("bf16"), True),
        (ARM.format("sve"), False),
        ("", False),
    ],
)
def test_fast_products_of_bfloat16_are_found_in_the_list_of_instructions(text, native, monkeypatch):
    monkeypatch.setattr("linrope.utils.machine.sys.platform", "linux")
    monkeypatch.setattr("linrope.utils.machine.Path.read_text", lambda path, encoding: text)
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: True)
    assert has_fast_bfloat16() is native
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: False)
    assert has_fast_bfloat16() is False


@pytest.mark.parametrize(("said", "native"), [(b"1\n", True), (b"0\n", False), (b"", False)])
def test_macos_is_asked_by_sysctl(said, native, monkeypatch):
    monkeypatch.setattr("linrope.utils.machine.sys.platform", "darwin")
    monkeypatch.setattr("linrope.utils.machine.subprocess.run", lambda *_, **__: SimpleNamespace(stdout=said))
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: True)
    assert has_fast_bfloat16() is native


@pytest.mark.parametrize(
    ("vendor", "told", "fast"),
    [
        ("AMD64 Family 25 Model 97 Stepping 2, AuthenticAMD", {"avx512_bf16": True, "amx_bf16": False}, True),
        ("Intel64 Family 6 Model 143 Stepping 8, GenuineIntel", {"avx512_bf16": True, "amx_bf16": False}, False),
        ("Intel64 Family 6 Model 143 Stepping 8, GenuineIntel", {"avx512_bf16": True, "amx_bf16": True}, True),
        ("AMD64 Family 25 Model 97 Stepping 2, AuthenticAMD", {}, False),
    ],
)
def test_on_windows_pytorch_is_asked(vendor, told, fast, monkeypatch):
    monkeypatch.setattr("linrope.utils.machine.sys.platform", "win32")
    monkeypatch.setattr("linrope.utils.machine.Path.read_text", _missing)
    monkeypatch.setattr("linrope.utils.machine.platform.processor", lambda: vendor)
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: told, raising=False)
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: True)
    assert has_fast_bfloat16() is fast


def _missing(path, encoding):
    raise FileNotFoundError


def test_a_system_without_a_list_has_none(monkeypatch):
    monkeypatch.setattr("linrope.utils.machine.sys.platform", "freebsd14")
    monkeypatch.setattr("linrope.utils.machine.Path.read_text", _missing)
    assert has_fast_bfloat16() is False


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
