"""ffi-examples/python/kvstate: every struct is that of the header, by size, and by name, offset, size and sign of each field.

So are constants, and the number of arguments of each call. structs.py INCLUDE: the folder of kvstate.h. Needs a C compiler
(CC, or cc). Run by tests/abi.rs, which sets PYTHONPATH.
"""

import ctypes
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import tempfile

import kvstate

include = sys.argv[1]
with open(os.path.join(include, "kvstate.h")) as file:
    header = file.read()

INTEGERS = {ctypes.c_int32: "i", ctypes.c_int64: "i", ctypes.c_uint32: "u", ctypes.c_uint64: "u", ctypes.c_size_t: "u"}


def subclasses(kind):
    for one in kind.__subclasses__():
        yield one
        yield from subclasses(one)


def of_the_package():
    """All structs, wherever in the package they are."""
    for module in pkgutil.iter_modules(kvstate.__path__):
        importlib.import_module(f"kvstate.{module.name}")
    return [one for one in subclasses(ctypes.Structure) if one.__module__.startswith("kvstate.") and hasattr(one, "_fields_")]


def described(struct):
    """A line for the struct and one for each field, as the C program prints them."""
    yield f"{struct.c_name} {ctypes.sizeof(struct)}"
    for name, ctype in struct._fields_:
        field = getattr(struct, name)
        yield f"{struct.c_name}.{name} {field.offset} {field.size} {INTEGERS.get(ctype, 'other')}"


def fields_in_header(c_name):
    """Names of the members, in order."""
    body = re.search(rf"typedef struct {c_name} {{(.*?)\n}} {c_name};", header, re.DOTALL)
    assert body, f"the header has no {c_name}"
    code = re.sub(r"//.*", "", body[1])
    return re.findall(r"(\w+)(?:\[\w+\])?;", code)


def program(structs):
    kind = '_Generic((x), int32_t: "i", int64_t: "i", uint32_t: "u", uint64_t: "u", default: "other")'
    yield f"#include <kvstate.h>\n#include <stdio.h>\n#define KIND(x) {kind}\nint main(void) {{"
    for struct in structs:
        name = struct.c_name
        yield f'printf("{name} %zu\\n", sizeof({name}));'
        for field in fields_in_header(name):
            there = f"(({name} *)0)->{field}"
            yield f'printf("{name}.{field} %zu %zu %s\\n", offsetof({name}, {field}), sizeof {there}, KIND({there}));'
    yield "return 0;}"


def by_c(structs):
    with tempfile.TemporaryDirectory() as folder:
        source, exe = os.path.join(folder, "structs.c"), os.path.join(folder, "structs")
        with open(source, "w") as file:
            file.write("\n".join(program(structs)))
        subprocess.run([os.environ.get("CC", "cc"), "-std=c11", "-I", include, source, "-o", exe], check=True)
        return subprocess.run([exe], check=True, capture_output=True, text=True).stdout.splitlines()


def compare(python, c):
    """Fails with the lines that only one of both has."""
    assert python == c, "\n".join(
        [f"python: {line}" for line in python if line not in c] + [f"     C: {line}" for line in c if line not in python]
    )


def differs(python, c):
    try:
        compare(python, c)
    except AssertionError as error:
        return str(error)
    raise AssertionError("a struct that is another was not noticed")


def another(struct, *fields):
    """A struct of that name with other fields."""
    return type("Another", (ctypes.Structure,), dict(c_name=struct.c_name, _fields_=list(fields)))


structs = of_the_package()
assert len(structs) == len({struct.c_name for struct in structs}) >= 26, structs
all_of_c = by_c(structs)
compare([line for struct in structs for line in described(struct)], all_of_c)

# What this test is for: a field that is renamed, moved, missing, of another size or sign.
plane = next(struct for struct in structs if struct.c_name == "kvs_plane")
lines = by_c([plane])
fields = list(plane._fields_)
assert fields[2] == ("device", ctypes.c_int32)
for broken in (
    fields[:2] + [("dev", ctypes.c_int32)] + fields[3:],
    fields[:2] + [fields[3], fields[2]] + fields[4:],
    fields[:2] + fields[3:],
    fields[:2] + [("device", ctypes.c_int64)] + fields[3:],
    fields[:2] + [("device", ctypes.c_uint32)] + fields[3:],
    fields + [("more", ctypes.c_int32)],
):
    assert "python: kvs_plane" in differs(list(described(another(plane, *broken))), lines)

constants = {name: value for name, value in vars(kvstate.constants).items() if name.isupper()}
assert len(constants) > 60
for name, value in constants.items():
    c_name = "KVS_" + re.sub("^FLAGS_", "STATE_SEQ_FLAGS_", name)
    defined = re.search(rf"^#define {c_name} (.+)$", header, re.MULTILINE)
    assert defined and eval(defined[1]) == value, (name, value, defined and defined[1])
statuses = set(re.findall(r"^#define KVS_(STATUS_\w+)", header, re.MULTILINE))
assert statuses - set(constants) == {"STATUS_OK"}

code = re.sub(r"//.*", "", header)
for name, _, *arguments in kvstate._calls._CALLS:
    declared = re.search(rf"\b{name}\(([^()]*)\);", code)[1]
    n = 0 if declared == "void" else declared.count(",") + 1
    assert len(arguments) == n, (name, declared)
