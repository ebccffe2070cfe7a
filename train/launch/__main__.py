"""`python -m train.launch [options] -- CONFIG [overrides]`: a short name for one program.

It is `python -m jaxcomp.launch [options] -- python -m train CONFIG [overrides]`, with what a config
says, see `train.launch.program`.
"""

import sys

from train.__main__ import ended_at_once

if __name__ == "__main__":
    with ended_at_once():
        from jaxcomp.launch.__main__ import main
        from train.launch.program import TRAIN

    main(sys.argv[1:], TRAIN)
