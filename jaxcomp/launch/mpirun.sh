#!/bin/bash
# One run with mpirun of Open MPI, MPICH or Intel MPI; MPI itself is not used:
#     MPIRUN="mpirun -np 4 --hostfile hosts" \
#         bash mpirun.sh [jaxcomp.launch's options] -- PROGRAM [arguments]
# Open MPI 5, MPICH and Intel MPI do not say where rank 0 runs: add --coordinator HOST:29411 with
# the first host. Older Open MPI takes the host where mpirun runs, if nothing else is said. PYTHON
# is the interpreter.
set -euo pipefail

# mpirun does not bring PATH to other hosts, on which python may be another one.
python=$(command -v "${PYTHON:-python}")
# By default mpirun binds each process to one core.
exec ${MPIRUN:-mpirun} --bind-to none "$python" -u -m jaxcomp.launch "$@"
