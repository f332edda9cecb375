#!/usr/bin/env python3
"""nvrtc.py LIBNVRTC SOURCE OUT OPTION...: PTX by NVRTC; needs neither a GPU nor a driver."""

import ctypes
import os
import sys


class Nvrtc:
    def __init__(self, path):
        self.lib = ctypes.CDLL(path)
        self.lib.nvrtcGetErrorString.restype = ctypes.c_char_p
        self.program = ctypes.c_void_p()

    def call(self, name, *args):
        result = getattr(self.lib, name)(*args)
        if result != 0:
            sys.exit(f"{name}: {self.lib.nvrtcGetErrorString(result).decode()}")

    def text(self, what):
        size = ctypes.c_size_t()
        self.call(f"nvrtcGet{what}Size", self.program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self.call(f"nvrtcGet{what}", self.program, text)
        return text.value

    def compile(self, name, source, options):
        self.call("nvrtcCreateProgram", ctypes.byref(self.program), source, name, 0, None, None)
        array = (ctypes.c_char_p * len(options))(*options)
        result = self.lib.nvrtcCompileProgram(self.program, len(options), array)
        log = self.text("ProgramLog").decode().strip()
        # A warning is an error too.
        if result != 0 or log:
            sys.exit(f"{name.decode()}: {log or self.lib.nvrtcGetErrorString(result).decode()}")
        return self.text("PTX")


def main():
    library, source, out = sys.argv[1:4]
    with open(source, "rb") as file:
        text = file.read()
    # The name without its folder: PTX says where it comes from.
    name = os.path.basename(source).encode()
    ptx = Nvrtc(library).compile(name, text, [option.encode() for option in sys.argv[4:]])
    with open(out, "wb") as file:
        file.write(ptx)


main()
