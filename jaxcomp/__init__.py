"""Trains one model on many machines over a slow network.

Optax transformations with their own collectives, which send a few percent of the bytes.
"""

import importlib.metadata as _metadata

from jaxcomp import islands as islands
from jaxcomp import schedules as schedules
from jaxcomp.compressors.base import Compressor as Compressor
from jaxcomp.compressors.base import Key as Key
from jaxcomp.compressors.base import Payload as Payload
from jaxcomp.compressors.base import identity as identity
from jaxcomp.compressors.bin_means import bin_means as bin_means
from jaxcomp.compressors.compose import cocktail as cocktail
from jaxcomp.compressors.compose import compose as compose
from jaxcomp.compressors.learned import learned_levels as learned_levels
from jaxcomp.compressors.policies import by_path as by_path
from jaxcomp.compressors.policies import last_layers_first as last_layers_first
from jaxcomp.compressors.quantize import cast as cast
from jaxcomp.compressors.quantize import quantize as quantize
from jaxcomp.compressors.rotated import rotated as rotated
from jaxcomp.compressors.sign import sign as sign
from jaxcomp.compressors.sparse import group_top_1 as group_top_1
from jaxcomp.compressors.sparse import random_k as random_k
from jaxcomp.compressors.sparse import top_k as top_k
from jaxcomp.exchange.messages import Transmission as Transmission
from jaxcomp.exchange.messages import transmit as transmit
from jaxcomp.exchange.wire import Transport as Transport
from jaxcomp.exchange.wire import from_senders as from_senders
from jaxcomp.exchange.wire import gathered as gathered
from jaxcomp.exchange.wire import two_shot as two_shot
from jaxcomp.measure import planner as planner
from jaxcomp.measure import report as report
from jaxcomp.measure.dense import assert_no_dense as assert_no_dense
from jaxcomp.measure.planner import plan as plan
from jaxcomp.methods.clipping import clip_by_global_norm as clip_by_global_norm
from jaxcomp.methods.cocktail_sgd import CocktailSGDState as CocktailSGDState
from jaxcomp.methods.cocktail_sgd import cocktail_sgd as cocktail_sgd
from jaxcomp.methods.compressed_mean import CompressedMeanState as CompressedMeanState
from jaxcomp.methods.compressed_mean import compressed_mean as compressed_mean
from jaxcomp.methods.demo import DemoState as DemoState
from jaxcomp.methods.demo import demo as demo
from jaxcomp.methods.dion import DionState as DionState
from jaxcomp.methods.dion import dion as dion
from jaxcomp.methods.local_presets import diloco as diloco
from jaxcomp.methods.local_presets import muloco as muloco
from jaxcomp.methods.local_presets import sparse_loco as sparse_loco
from jaxcomp.methods.local_presets import streaming_diloco as streaming_diloco
from jaxcomp.methods.local_steps import LocalStepsState as LocalStepsState
from jaxcomp.methods.local_steps import local_steps as local_steps
from jaxcomp.methods.mean_momentum import mean_momentum as mean_momentum
from jaxcomp.methods.moments import Deviations as Deviations
from jaxcomp.methods.muon import muon as muon
from jaxcomp.methods.one_bit_adam import OneBitAdamState as OneBitAdamState
from jaxcomp.methods.one_bit_adam import one_bit_adam as one_bit_adam
from jaxcomp.methods.one_bit_lamb import OneBitLambState as OneBitLambState
from jaxcomp.methods.one_bit_lamb import TrustRatio as TrustRatio
from jaxcomp.methods.one_bit_lamb import one_bit_lamb as one_bit_lamb
from jaxcomp.methods.power_sgd import PowerSGDState as PowerSGDState
from jaxcomp.methods.power_sgd import power_sgd as power_sgd
from jaxcomp.methods.precision import LossScaleState as LossScaleState
from jaxcomp.methods.precision import MasterWeightsState as MasterWeightsState
from jaxcomp.methods.precision import loss_scale as loss_scale
from jaxcomp.methods.precision import master_weights as master_weights
from jaxcomp.methods.rare_rows import RareRowsState as RareRowsState
from jaxcomp.methods.rare_rows import rare_rows as rare_rows
from jaxcomp.methods.sharded_optimizer import ShardedOptimizerState as ShardedOptimizerState
from jaxcomp.methods.sharded_optimizer import sharded_optimizer as sharded_optimizer
from jaxcomp.methods.slamb import Rescaling as Rescaling
from jaxcomp.methods.slamb import SlambState as SlambState
from jaxcomp.methods.slamb import slamb as slamb
from jaxcomp.methods.zero_one_adam import ZeroOneAdamState as ZeroOneAdamState
from jaxcomp.methods.zero_one_adam import zero_one_adam as zero_one_adam
from jaxcomp.replicas.compact import compact as compact
from jaxcomp.replicas.kinds import by_kind as by_kind
from jaxcomp.replicas.kinds import leaf_kinds as leaf_kinds
from jaxcomp.replicas.layers import per_layer as per_layer
from jaxcomp.replicas.protocol import MethodState as MethodState
from jaxcomp.replicas.resize import reset_residuals as reset_residuals
from jaxcomp.replicas.resize import resize as resize
from jaxcomp.replicas.specs import state_specs as state_specs
from jaxcomp.replicas.state import local_params as local_params
from jaxcomp.replicas.state import per_replica as per_replica
from jaxcomp.sharded.qsdp import QSDP as QSDP
from jaxcomp.sharded.qsdp import qsdp as qsdp
from jaxcomp.sharded.step import QSDPState as QSDPState
from jaxcomp.sharded.step import qsdp_train_step as qsdp_train_step
from jaxcomp.steps.compiling import compiler_options as compiler_options
from jaxcomp.steps.evaluate import eval_step as eval_step
from jaxcomp.steps.evaluate import mean_params as mean_params
from jaxcomp.steps.evaluate import replica_spread as replica_spread
from jaxcomp.steps.overlapped import OverlappedStep as OverlappedStep
from jaxcomp.steps.overlapped import overlapped_train_step as overlapped_train_step
from jaxcomp.steps.simulated import simulated_train_step as simulated_train_step
from jaxcomp.steps.train import TrainStep as TrainStep
from jaxcomp.steps.train import state_shapes as state_shapes
from jaxcomp.steps.train import train_step as train_step

try:
    __version__ = _metadata.version("jaxcomp")
except _metadata.PackageNotFoundError:  # a checkout on the path that nobody has installed
    __version__ = "0+checkout"
