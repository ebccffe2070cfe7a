#!/bin/bash
# One run with mpirun of Open MPI, MPICH or Intel MPI; MPI itself is not used:
#     MPIRUN="mpirun -np 4 --hostfile hosts" \
#         bash mpirun.sh --coordinator HOST:29411 -- PROGRAM [arguments]
# HOST is the first of the hosts. Only Open MPI 4 does without: it takes the host where mpirun runs.
# Other options of jaxcomp.launch stand beside it. PYTHON is the interpreter.
set -euo pipefail

# mpirun does not bring PATH to other hosts, on which python may be another one.
python=$(command -v "${PYTHON:-python}")
# By default mpirun binds each process to one core.
exec ${MPIRUN:-mpirun} --bind-to none "$python" -u -m jaxcomp.launch "$@"
