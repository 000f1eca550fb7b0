"""What devices can compute at best, to say which share of it a run reaches (MFU).

Dense bfloat16 figures of the makers' data sheets; a device that is not listed has no known peak.
"""

_BFLOAT16_FLOPS = {
    "A100": 312e12,
    "A10": 125e12,
    "A40": 149.7e12,
    "L4": 121e12,
    "L40": 181e12,
    "RTX 4090": 165.2e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "V100": 125e12,
}
# float32 products run as TF32, at half the rate, where the device has it.
_NO_TF32 = ("V100",)


def peak_flops(device_name: str, dtype_name: str) -> float | None:
    """Return the floating-point operations a second of one device, or None if they are not known."""
    known = [name for name in _BFLOAT16_FLOPS if _has_words(device_name, name)]
    if not known:
        return None
    name = max(known, key=len)
    if dtype_name == "bfloat16":
        return _BFLOAT16_FLOPS[name]
    return None if name in _NO_TF32 else _BFLOAT16_FLOPS[name] / 2


def _has_words(device_name: str, words: str) -> bool:
    text = f" {device_name.replace('-', ' ')} "
    return all(f" {word} " in text for word in words.split())
