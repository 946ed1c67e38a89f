"""The process in which NVRTC compiles: `host_compiler.run_compiler` gives it limits. It imports nothing but Python's own modules.

`python nvrtc_child.py LIBRARY FOLDER` reads a program as JSON and writes `code`, if there is any, and `log` into the folder. Its exit code
is NVRTC's own, 0 where it compiled.
"""

import ctypes
import json
import sys
from pathlib import Path


def main(path: str, folder: Path) -> int:
    """Compile what standard input holds."""
    library, told = ctypes.CDLL(path), json.load(sys.stdin)
    source, name, *more = ([text.encode() for text in texts] for texts in ([told["source"]], [told["name"]], told["headers"],
                                                                          told["names"], told["options"]))  # fmt: skip
    headers, names, options = ((ctypes.c_char_p * len(texts))(*texts) for texts in more)
    program = ctypes.c_void_p()
    failed = library.nvrtcCreateProgram(ctypes.byref(program), source[0], name[0], len(headers), headers, names)
    if failed:
        return int(failed)
    failed = library.nvrtcCompileProgram(program, len(options), options)

    def write(file: str, what: str) -> None:
        size = ctypes.c_size_t()
        if getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0:
            content = ctypes.create_string_buffer(size.value)
            getattr(library, f"nvrtcGet{what}")(program, content)
            (folder / file).write_bytes(content.raw)

    write("log", "ProgramLog")
    if not failed:
        write("code", "CUBIN" if told["cubin"] else "PTX")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
