"""vLLM's Ray executor, kept to the nodes of one launch: `--distributed-executor-backend` takes it.

What: before vLLM's executor looks for a place, this reserves one GPU per rank on the Ray nodes that
carry the launch's own resource. Why: left alone, vLLM takes any free GPU of the cluster it joins,
and a node of somebody else has neither this plug-in nor the weights. It also keeps what belongs to
one node, and every secret, out of the variables that vLLM copies from the driver to all ranks.

What must stay true: without `GLM_EXL3_RAY_RESOURCE` it places ranks as vLLM does.
"""

from __future__ import annotations

import os
from typing import Any

import ray
from vllm.ray import ray_env
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2

from glm_exl3 import envs
from glm_exl3.ray import rules


class LaunchRayExecutor(RayExecutorV2):
    """`RayExecutorV2` on the nodes of this launch; see the module docstring."""

    def _init_executor(self) -> None:
        ray_env.RAY_NON_CARRY_OVER_ENV_VARS.update(rules.kept_back(os.environ))
        resource = envs.RAY_RESOURCE.read()
        if resource and self.parallel_config.placement_group is None:
            self.parallel_config.placement_group = _reserve(self.parallel_config, resource)
        super()._init_executor()


def _reserve(parallel_config: Any, resource: str) -> Any:
    """A placement group over the launch's nodes, once they have all joined.

    Raises GlmExl3Error when they have not within GLM_EXL3_JOIN_TIMEOUT_S.
    """
    if not ray.is_initialized():
        ray.init(runtime_env=parallel_config.ray_runtime_env)
    group = ray.util.placement_group(
        rules.bundles(parallel_config.world_size, resource), strategy="PACK"
    )
    if not group.wait(envs.JOIN_TIMEOUT_S.read()):
        raise rules.too_few(parallel_config.world_size, resource, ray.nodes())
    return group
