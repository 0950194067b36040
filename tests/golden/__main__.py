import sys

from tests.golden import FIXTURES, NAMES
from tests.golden.write import write

for name in sys.argv[1:] or NAMES:
    write(name, FIXTURES / name)
    sizes = {path.name: path.stat().st_size for path in sorted((FIXTURES / name).iterdir())}
    print(
        f"{name}: {sum(sizes.values()):,} bytes",
        *(f"{file} {size:,}" for file, size in sizes.items()),
        sep="  ",
    )
