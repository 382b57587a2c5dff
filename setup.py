"""Packages of fastformer; everything static lives in pyproject.toml.

`kernels/` stays at the root of the repository and is installed as `fastformer.kernels`. It has no __init__.py: with one,
a checkout on sys.path would shadow Hugging Face's `kernels` package, which transformers probes by importing it.
"""

from setuptools import find_packages, setup

setup(
    packages=find_packages(include=["fastformer*"]) + ["fastformer.kernels"],
    package_dir={"fastformer.kernels": "kernels"},
)
