"""Maps the two mounted trees, ``ps/`` and ``transformers/``, below ``distkeras``.

Each tree is looked through by itself, because the links in ``distkeras/`` are there in a checkout but not in an sdist.
Everything else about the package stands in ``pyproject.toml``.
"""

from setuptools import find_packages, setup


def packages(folder: str, name: str) -> list[str]:
    """The package ``name`` in ``folder``, and all below it."""
    below = find_packages(folder, exclude=["ps", "ps.*", "transformers", "transformers.*"])
    return [name, *(f"{name}.{package}" for package in below)]


setup(
    packages=[
        *packages("distkeras", "distkeras"),
        *packages("ps", "distkeras.ps"),
        *packages("transformers", "distkeras.transformers"),
    ],
    package_dir={"distkeras": "distkeras", "distkeras.ps": "ps", "distkeras.transformers": "transformers"},
    package_data={
        "distkeras": ["py.typed", "log4j2.properties"],
        "distkeras.dashboard": ["static/*"],
        "distkeras.ml": ["*.pyi"],
        "distkeras.job_server.store": ["migrations/*.py", "migrations/versions/*.py"],
    },
)
