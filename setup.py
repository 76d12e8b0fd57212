"""Packages of the distribution: two source trees, and the Hydra groups as `vsa.configs`; the rest is pyproject.toml."""

from setuptools import find_packages, setup

setup(
    # never "*": it would package tests/ and benchmarks/
    packages=[*find_packages(include=["vsa", "vsa.*"]), *find_packages("kernels"), "vsa.configs"],
    package_dir={"vsa_kernels": "kernels/vsa_kernels", "vsa.configs": "configs"},
    package_data={
        "vsa.configs": ["**/*.yaml"],
        "vsa_kernels": ["*.json"],
        "vsa.checkpoints": ["original_names.yaml"],
        "vsa.data": ["dct_bands.txt"],
        "vsa.evaluation.inspection": ["page.*"],
        "vsa.pages": ["page.*"],
    },
)
