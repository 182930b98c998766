"""Faults that are planted in the code under simulation and removed again."""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from mutants.catalog import FAULTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
#: A replacement: an object, the name of its attribute, and the replaced value.
Patch = tuple[Any, str, Any]

MUTATIONS: dict[str, Callable[[], list[Patch]]] = {}
#: The faults of `mutants.catalog`, by name.
REPLACEMENTS = {fault.name: fault for fault in FAULTS}


#: The files whose faults concern only jobs with shards.
_OF_SHARDS = ("ps/shards/", "ps/checkpoint/parts.py")


def simulated() -> list[str]:
    """Return the names of the faults that the simulation finds, and no test."""
    return [*MUTATIONS, *(fault.name for fault in FAULTS if not fault.tests)]


def divides(name: str) -> bool:
    """Return whether a fault concerns only jobs with shards."""
    if name in MUTATIONS:
        return MUTATIONS[name].__module__.endswith("shard_mutations")
    return REPLACEMENTS[name].file.startswith(_OF_SHARDS)


def mutation(make: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
    """Add a fault to `MUTATIONS` under the name of the function that makes it."""
    MUTATIONS[make.__name__.strip("_").replace("_", "-")] = make
    return make


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Run the context with one of `MUTATIONS` or `REPLACEMENTS`."""
    patches = MUTATIONS[name]() if name in MUTATIONS else []
    codes = replaced_code(REPLACEMENTS[name]) if name in REPLACEMENTS else []
    originals = [(function, function.__code__) for function, _ in codes]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(mock.patch.object(*patch))
        try:
            for function, code in codes:
                function.__code__ = code
            yield
        finally:
            for function, code in originals:
                function.__code__ = code


def replaced_code(fault: Mutant) -> list[tuple[types.FunctionType, types.CodeType]]:
    """Return each function that ``fault`` changes, with its code.

    Raises:
        ValueError: the fault is not in the code of a function.
    """
    package = "" if fault.file.startswith("distkeras/") else "distkeras."
    module = importlib.import_module(package + fault.file.removesuffix(".py").replace("/", "."))
    changed = {code.co_qualname: code for code in _codes(compile(fault.applied(ROOT), str(module.__file__), "exec"))}
    codes = []
    for function in _functions(module):
        code = changed.get(function.__qualname__)
        if code is not None and _content(code) != _content(function.__code__):
            codes.append((function, code))
    if not codes:
        raise ValueError(f"{fault.name}: the fault must be in the code of a function of {fault.file}")
    return codes


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _content(code: types.CodeType) -> tuple[Any, ...]:
    """Return what a function does, without the numbers of its lines."""
    constants = tuple(_content(each) if isinstance(each, types.CodeType) else repr(each) for each in code.co_consts)
    return code.co_code, code.co_names, code.co_varnames, constants


def _functions(holder: Any) -> Iterator[types.FunctionType]:
    """Yield the functions of a module and of its classes."""
    for value in vars(holder).values():
        if isinstance(value, type) and value.__module__ == getattr(holder, "__name__", ""):
            yield from _functions_of_class(value)
        elif isinstance(value, types.FunctionType) and value.__globals__ is vars(sys.modules[holder.__name__]):
            yield value


def _functions_of_class(kind: type) -> Iterator[types.FunctionType]:
    for value in vars(kind).values():
        if isinstance(value, property):
            value = value.fget
        elif isinstance(value, functools.cached_property):
            value = value.func
        elif isinstance(value, staticmethod | classmethod):
            value = value.__func__
        if isinstance(value, types.FunctionType):
            yield value


def nothing(*arguments: Any, **options: Any) -> None:
    """Do nothing, in place of a check."""
