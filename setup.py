"""Maps the two mounted trees, ``ps/`` and ``transformers/``, below ``distkeras``.

They are listed by hand because ``find_packages`` follows the links of a checkout but an sdist has none.
Everything else about the package stands in ``pyproject.toml``.
"""

from setuptools import setup

setup(
    packages=["distkeras", "distkeras.ps", "distkeras.ps.rules", "distkeras.transformers"],
    package_dir={"distkeras": "distkeras", "distkeras.ps": "ps", "distkeras.transformers": "transformers"},
    package_data={"distkeras": ["py.typed"]},
)
