#!/bin/bash
# One run with Open MPI's launcher; MPI itself is not used:
#     MPIRUN="mpirun -np 4 --hostfile hosts" \
#         bash train/launch/mpirun.sh [train.launch's options] -- CONFIG [overrides]
# Open MPI 5 does not say where rank 0 runs: add --coordinator HOST:29411 with the first host.
# Older ones take the host where mpirun runs, if nothing else is said. PYTHON is the interpreter.
set -euo pipefail

# By default mpirun binds each process to one core.
exec ${MPIRUN:-mpirun} --bind-to none "${PYTHON:-python}" -u -m train.launch "$@"
