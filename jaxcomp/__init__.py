"""Training of one model on many machines whose network is too slow for it.

Optax transformations with collectives of their own, which send a few percent of the bytes.
"""

from jaxcomp import planner as planner
from jaxcomp import report as report
from jaxcomp import schedules as schedules
from jaxcomp.buckets import by_path as by_path
from jaxcomp.compact import compact as compact
from jaxcomp.compressors import Compressor as Compressor
from jaxcomp.compressors import Key as Key
from jaxcomp.compressors import Payload as Payload
from jaxcomp.compressors import cast as cast
from jaxcomp.compressors import cocktail as cocktail
from jaxcomp.compressors import compose as compose
from jaxcomp.compressors import group_top_1 as group_top_1
from jaxcomp.compressors import identity as identity
from jaxcomp.compressors import learned_levels as learned_levels
from jaxcomp.compressors import quantize as quantize
from jaxcomp.compressors import random_k as random_k
from jaxcomp.compressors import rotated as rotated
from jaxcomp.compressors import sign as sign
from jaxcomp.compressors import top_k as top_k
from jaxcomp.overlap import OverlappedStep as OverlappedStep
from jaxcomp.overlap import overlapped_train_step as overlapped_train_step
from jaxcomp.planner import plan as plan
from jaxcomp.qsdp import QSDP as QSDP
from jaxcomp.qsdp import qsdp as qsdp
from jaxcomp.qsdp_step import QSDPState as QSDPState
from jaxcomp.qsdp_step import qsdp_train_step as qsdp_train_step
from jaxcomp.resizing import resize as resize
from jaxcomp.sharding import local_params as local_params
from jaxcomp.sharding import per_replica as per_replica
from jaxcomp.simulation import simulated_train_step as simulated_train_step
from jaxcomp.specs import state_specs as state_specs
from jaxcomp.step import TrainStep as TrainStep
from jaxcomp.step import replica_spread as replica_spread
from jaxcomp.step import train_step as train_step
from jaxcomp.transforms import CocktailSGDState as CocktailSGDState
from jaxcomp.transforms import CompressedMeanState as CompressedMeanState
from jaxcomp.transforms import OneBitAdamState as OneBitAdamState
from jaxcomp.transforms import OneBitLambState as OneBitLambState
from jaxcomp.transforms import ShardedOptimizerState as ShardedOptimizerState
from jaxcomp.transforms import SlambState as SlambState
from jaxcomp.transforms import ZeroOneAdamState as ZeroOneAdamState
from jaxcomp.transforms import clip_by_global_norm as clip_by_global_norm
from jaxcomp.transforms import cocktail_sgd as cocktail_sgd
from jaxcomp.transforms import compressed_mean as compressed_mean
from jaxcomp.transforms import one_bit_adam as one_bit_adam
from jaxcomp.transforms import one_bit_lamb as one_bit_lamb
from jaxcomp.transforms import sharded_optimizer as sharded_optimizer
from jaxcomp.transforms import slamb as slamb
from jaxcomp.transforms import zero_one_adam as zero_one_adam
from jaxcomp.transmission import Transmission as Transmission
from jaxcomp.transmission import transmit as transmit
from jaxcomp.wire import gathered as gathered
from jaxcomp.wire import two_shot as two_shot
