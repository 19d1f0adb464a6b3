"""``python -m pybnorm`` is the command ``pybnorm``."""

from _pybnorm_command import main

if __name__ == "__main__":  # worker processes import this module too
    main()
