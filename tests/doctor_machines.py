"""Machines of others, written down as facts."""

from dataclasses import replace

from outsize.doctor.facts import Facts

PACKAGES: dict[str, str | None] = {
    "torch": "2.13.0",
    "bitsandbytes": "0.50.2",
    "diffusers": "0.42.1",
    "transformers": "5.24.0",
    "peft": "0.21.2",
    "safetensors": "0.8.0",
}

H200_LINUX = Facts(
    vendor="nvidia", os="linux", arch="sm_90", device="NVIDIA H200", num_devices=1, is_integrated=False,
    is_virtual=False, torch_build="cuda", tools=frozenset({"nvidia-smi"}),
    versions=PACKAGES | {"driver": "580.95.05", "kernel": "6.8.0-45", "cuda": "13.0", "triton": "3.7.0"},
)  # fmt: skip

RTX_4090_WINDOWS = Facts(
    vendor="nvidia", os="windows", arch="sm_89", device="NVIDIA GeForce RTX 4090", num_devices=1,
    driver_model="WDDM", is_integrated=False, torch_build="cuda", tools=frozenset({"nvidia-smi"}),
    versions=PACKAGES | {"driver": "566.36", "cuda": "13.0"},
)  # fmt: skip

RTX_4090_WSL = replace(
    H200_LINUX, arch="sm_89", device="NVIDIA GeForce RTX 4090", is_wsl=True, is_virtual=True
)

GFX1100_WINDOWS = Facts(
    vendor="amd", os="windows", arch="gfx1100", device="AMD Radeon RX 7900 XTX", num_devices=1,
    is_integrated=False, torch_build="rocm", tools=frozenset({"hipinfo"}), has_aotriton_images=True,
    versions=PACKAGES | {"rocm": "7.14.0", "hip": "7.14.60850", "driver": "32.0.21030.2001"},
)  # fmt: skip

GFX1201_LINUX = Facts(
    vendor="amd", os="linux", arch="gfx1201", device="AMD Radeon AI PRO R9700", num_devices=1,
    is_integrated=False, is_virtual=False, torch_build="rocm", tools=frozenset({"rocminfo"}),
    has_aotriton_images=True, sysctl={"vm.compact_unevictable_allowed": "1"},
    versions=PACKAGES | {"rocm": "7.2.3", "hip": "7.2.53211", "kernel": "6.8.0-45", "triton": "3.6.0"},
)  # fmt: skip

NO_CARD = Facts(
    vendor="none",
    os="linux",
    is_virtual=True,
    torch_build="cpu",
    tools=frozenset(),
    versions=PACKAGES,
)
