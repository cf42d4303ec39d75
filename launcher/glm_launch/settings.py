"""Every setting, defined once: name, type, range, default, help and scope.

`.env.example` and docs/configuration.md are rendered from these fields (`settings_pages`) and
`settings_load` reads them, so a knob has no second definition. The names are those that users of
GLM-5.3-Flash stacks know. `scope` says where a value takes effect: on the host that launches, on
the head, or on all ranks.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    field_validator,
)
from pydantic.fields import FieldInfo

from glm_launch.parsing import (
    device_name,
    extra_arguments,
    host_address,
    multimodal_limits,
    split_list,
    split_shell,
)
from glm_launch.settings_drafts import DraftSettings
from glm_launch.settings_edits import EditSettings
from glm_launch.settings_field import setting
from glm_launch.settings_recode import RecodeSettings

Address = Annotated[str, AfterValidator(host_address)]
Addresses = Annotated[tuple[Address, ...], BeforeValidator(split_list)]
Size = Annotated[int, Field(ge=1, le=8192)]
Sizes = Annotated[tuple[Size, ...], BeforeValidator(split_list)]
Limits = Annotated[dict[str, int], BeforeValidator(multimodal_limits)]
Arguments = Annotated[tuple[str, ...], BeforeValidator(extra_arguments)]
ServedName = Annotated[str, Field(pattern=r"^[\w.:/+-]+$")]
Port = Annotated[int, Field(ge=1, le=65535)]
Device = Annotated[str, AfterValidator(device_name)]
Devices = Annotated[tuple[Device, ...], BeforeValidator(split_list)]
SshName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][\w.@:-]*$")]
SshNames = Annotated[tuple[SshName, ...], BeforeValidator(split_list)]
User = Annotated[str, Field(pattern=r"^([A-Za-z_][\w.-]*)?$")]
RayAddress = Annotated[str, Field(pattern=r"^([^\s,]+:\d{1,5}|auto|local|ray://\S*)?$")]
AbsolutePath = Annotated[str, Field(pattern=r"^([/~][^\s,\"]*)?$")]
Reference = Annotated[str, Field(pattern=r"^([A-Za-z0-9][\w./:@-]*)?$")]


class Settings(DraftSettings, EditSettings, RecodeSettings):
    """The validated settings of one command; frozen."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", str_strip_whitespace=True, hide_input_in_errors=True
    )

    MODEL: str = setting(
        "", "Folder of the EXL3 checkpoint or, in containers, its hub repository.",
        "Model", "all ranks", basic=True,
    )  # fmt: skip
    MODEL_REVISION: str = setting(
        "", "Revision to pin when MODEL is a hub repository; empty: main.", "Model", "all ranks"
    )
    MODEL_FALLBACK: str = setting(
        "", "Hub repository to use when MODEL is not available.", "Model", "host"
    )
    SERVED_MODEL_NAME: ServedName = setting(
        "GLM-5.3-Flash-EXL3", "Name of the model in the API.", "Model", "head"
    )
    HF_HOME: AbsolutePath = setting(
        "", "Hub cache; empty: the hub's own default.", "Model", "all ranks"
    )
    HF_TOKEN: SecretStr | None = setting(
        None, "Token for the hub, used for downloads on the head only.", "Model", "host"
    )
    WEIGHTS_REHASH_DAYS: float = setting(
        30, "Days after which files that look unchanged are hashed again.",
        "Model", "host", ge=0, le=3650,
    )  # fmt: skip

    SPEC_METHOD: Literal["dflash", "mtp", "none"] = setting(
        "dflash",
        "Drafting: dflash (needs DFLASH_MODEL), mtp (the checkpoint's own head) or none. "
        "The demo drafts only when this is set.",
        "Drafting", "all ranks", basic=True,
    )  # fmt: skip
    DFLASH_MODEL: str = setting(
        "", "Folder or, in containers, hub repository of the DFlash2 drafter.",
        "Drafting", "all ranks", basic=True,
    )  # fmt: skip
    DFLASH_REVISION: str = setting(
        "", "Revision to pin when DFLASH_MODEL is a hub repository.", "Drafting", "all ranks"
    )
    DFLASH_TOKENS: int = setting(
        7, "Tokens DFlash2 drafts per step.", "Drafting", "all ranks", ge=1, le=15
    )
    DFLASH_DRAFT_TP: int = setting(
        0, "Tensor parallelism of the drafter. vLLM 0.33 knows that of the target only; 0: that.",
        "Drafting", "all ranks", ge=0, le=8,
    )  # fmt: skip
    MTP_TOKENS: int = setting(
        2, "Tokens the MTP head drafts per step.", "Drafting", "all ranks", ge=1, le=8
    )
    MIN_ACCEPTANCE: float = setting(
        0.02, "Share of drafted tokens that a warm-up must see accepted before READY; 0: any.",
        "Drafting", "host", ge=0, le=1,
    )  # fmt: skip
    REPLY_ACCEPTANCE: bool = setting(
        True, "Tell in every reply how many drafts were accepted (metrics.speculative_decoding).",
        "Drafting", "all ranks",
    )  # fmt: skip

    PORT: Port = setting(8888, "Port of the OpenAI-compatible API.", "API", "head", basic=True)
    API_HOST: Address = setting(
        "127.0.0.1", "Address the API listens on. Anything but loopback needs a key.",
        "API", "head", basic=True,
    )  # fmt: skip
    VLLM_API_KEY: SecretStr | None = setting(
        None, "Key that clients must send; empty: none.", "API", "head", basic=True
    )
    VLLM_API_KEY_FILE: AbsolutePath = setting(
        "", "File with that key, mode 0600, on the head only; ./start.sh key makes one.",
        "API", "head", basic=True,
    )  # fmt: skip
    ALLOW_OPEN_API: bool = setting(False, "Listen beyond loopback without a key.", "API", "head")

    PRESET: str = setting(
        "", "Defaults for a kind of cluster, from config/presets; empty: none.",
        "Nodes", "host", basic=True,
    )  # fmt: skip
    HEAD_IP: Address = setting(
        "127.0.0.1", "Address of the head, this machine, on the network between the nodes.",
        "Nodes", "all ranks", basic=True,
    )  # fmt: skip
    WORKER_IP: Addresses = setting(
        (), "Addresses of the other nodes on that network, separated by commas.",
        "Nodes", "host", basic=True,
    )  # fmt: skip
    WORKER_USER: User = setting(
        "", "User name on the workers; empty: that of ssh.", "Nodes", "host"
    )
    WORKER_SSH: SshNames = setting(
        (), "Names by which ssh knows the workers, in the order of WORKER_IP; empty: WORKER_IP.",
        "Nodes", "host",
    )  # fmt: skip
    WORKER_HOME: AbsolutePath = setting(
        "", "Home folder on the workers, where weights are put; empty: asked from each.",
        "Nodes", "host",
    )  # fmt: skip
    RUNTIME: Literal["auto", "local", "containers"] = setting(
        "auto", "How ranks run: local, as processes of this machine; containers, one per node; "
        "auto: containers when WORKER_IP, IMAGE or a PRESET for GPUs is set.",
        "Nodes", "host",
    )  # fmt: skip
    RANKS: Annotated[Literal[1, 2, 4], BeforeValidator(int)] = setting(
        2, "Ranks of RUNTIME=local; also the tensor parallelism.", "Nodes", "host"
    )
    GPUS_PER_NODE: int = setting(
        1, "GPUs, and ranks, of each node of RUNTIME=containers.", "Nodes", "host", ge=1, le=4
    )
    EXECUTOR: Literal["mp", "ray"] = setting(
        "mp", "What places the ranks on nodes: mp, vLLM's own processes; ray, for users of Ray.",
        "Nodes", "all ranks",
    )  # fmt: skip
    RAY_ADDRESS: RayAddress = setting(
        "", "HOST:PORT of a Ray cluster to join; empty: EXECUTOR=ray begins one on these nodes.",
        "Nodes", "all ranks",
    )  # fmt: skip
    RAY_PORT: Port = setting(
        29530, "First of 64 ports that Ray uses on every node. Nothing authenticates them: keep "
        "them off other networks.", "Nodes", "all ranks",
    )  # fmt: skip
    DEVICE: Literal["cuda", "cpu"] = setting(
        "cuda", "What containers compute on; cpu needs an image for CPUs.", "Nodes", "all ranks"
    )
    HEAD_CX7_IF: Device = setting(
        "", "Network device of the head's HEAD_IP; empty: chosen from facts.", "Nodes", "head"
    )
    WORKER_CX7_IF: Devices = setting(
        (), "The same on the workers: one for all, or one each.", "Nodes", "host"
    )
    HEAD_CX7_IB: Device = setting(
        "", "RDMA device of the head, such as rocep1s0f1 or rocep1s0f1:1; empty: chosen.",
        "Nodes", "head",
    )  # fmt: skip
    WORKER_CX7_IB: Devices = setting(
        (), "The same on the workers: one for all, or one each.", "Nodes", "host"
    )
    NCCL_IB_GID_INDEX: int = setting(
        -1, "GID index to force; -1: none, NCCL finds the entry by type and address.",
        "Nodes", "all ranks", ge=-1, le=255,
    )  # fmt: skip
    REQUIRE_RDMA: bool = setting(
        False, "Refuse a launch whose nodes would talk over sockets.", "Nodes", "host"
    )
    USE_HOST_NCCL: bool = setting(
        False, "Use the libnccl.so.2 that each node has instead of the image's.",
        "Nodes", "all ranks",
    )  # fmt: skip
    MASTER_PORT: Port = setting(
        29521, "Port where the ranks meet. Nothing authenticates it: keep it off other networks.",
        "Nodes", "all ranks",
    )  # fmt: skip
    WATCH_PORT: Port = setting(
        29522, "Port where the nodes say hello before the engine starts; HEAD_IP only.",
        "Nodes", "all ranks",
    )  # fmt: skip

    MAX_MODEL_LEN: int = setting(
        0, "Longest prompt plus answer in tokens; 0: what the model declares.",
        "Capacity", "all ranks", basic=True, ge=0, le=1_048_576,
    )  # fmt: skip
    MAX_NUM_SEQS: int = setting(
        4, "Requests served at once.", "Capacity", "all ranks", ge=1, le=1024
    )
    MAX_NUM_BATCHED_TOKENS: int = setting(
        0, "Tokens per engine step; 0: vLLM's choice.", "Capacity", "all ranks", ge=0, le=131_072
    )
    GPU_MEM_UTIL: float = setting(
        0.85, "Share of GPU memory the engine may use.", "Capacity", "all ranks", ge=0.1, le=0.98
    )
    KV_CACHE_DTYPE: Literal["auto", "bf16", "fp8", "int8"] = setting(
        "auto", "Rows of the KV cache; auto: what vLLM stores on this GPU.",
        "Capacity", "all ranks",
    )  # fmt: skip
    KV_CACHE_MEMORY_BYTES: int = setting(
        0, "Bytes of KV cache per rank, instead of GPU_MEM_UTIL; 0: computed.",
        "Capacity", "all ranks", ge=0, le=2**40,
    )  # fmt: skip
    KDA_STATE_DTYPE: Literal["auto", "bfloat16"] = setting(
        "auto", "Type of the KDA state; auto: float32. bfloat16 halves what a request pins.",
        "Capacity", "all ranks",
    )  # fmt: skip
    DRAFT_KV_CACHE_DTYPE: Literal["auto", "bfloat16", "fp8"] = setting(
        "auto", "Type of the drafter's KV cache; auto: bfloat16.", "Capacity", "all ranks"
    )
    PREFIX_HIT_TOKENS: int = setting(
        256, "Grain in tokens at which prompts find a stored prefix; 0: whole blocks.",
        "Capacity", "all ranks", ge=0, le=512, multiple_of=16,
    )  # fmt: skip
    KV_PARKING_GIB: int = setting(
        0, "Host memory in GiB over all ranks for idle prefixes; 0: none.",
        "Capacity", "all ranks", ge=0, le=4096,
    )  # fmt: skip
    INDEXER_WORKSPACE_MB: int = setting(
        0, "Scratch of the sparse-attention indexer per rank in MiB; 0: vLLM's choice.",
        "Capacity", "all ranks", ge=0, le=16384,
    )  # fmt: skip
    CUDAGRAPH_SIZES: Sizes = setting(
        (), "Batch sizes to capture as CUDA graphs, separated by commas; empty: vLLM's choice.",
        "Capacity", "all ranks",
    )  # fmt: skip
    ENFORCE_EAGER: bool = setting(False, "Do without CUDA graphs.", "Capacity", "all ranks")
    CPU_KV_GIB: int = setting(
        1, "KV cache per rank in GiB on a machine without a GPU.",
        "Capacity", "all ranks", ge=1, le=512,
    )  # fmt: skip
    CPU_THREADS: int = setting(
        0, "Cores per rank on a machine without a GPU; 0: the cores are shared out evenly.",
        "Capacity", "all ranks", ge=0, le=256,
    )  # fmt: skip

    MEM_FLOOR_GIB: float = setting(
        0, "Available memory in GiB below which a node's load is stopped; 0: that of the PRESET's "
        "hardware.",
        "Capacity", "host", ge=0, le=256,
    )  # fmt: skip

    LANGUAGE_MODEL_ONLY: bool = setting(False, "Serve text only.", "Images and video", "all ranks")
    LIMIT_MM: Limits = setting(
        {}, "Items per prompt, such as image=8,video=1; empty: vLLM's choice.",
        "Images and video", "all ranks",
    )  # fmt: skip
    SKIP_MM_PROFILING: bool = setting(
        True, "Reserve no memory for the largest image at start.", "Images and video", "all ranks"
    )

    IMAGE: Reference = setting(
        "", "Container image, best by digest; empty: what BUILD=1 makes.",
        "Containers", "all ranks", basic=True,
    )  # fmt: skip
    BUILD: bool = setting(False, "Build the image instead of pulling it.", "Containers", "host")
    SKIP_PULL: bool = setting(
        False, "Use the image that every node has: pull and send none.", "Containers", "host"
    )
    SKIP_OVERLAY_VERIFY: bool = setting(
        False, "Do without the self-check of the image on the head.", "Containers", "host"
    )
    GHCR_USER: User = setting("", "User name at the registry of IMAGE.", "Containers", "host")
    GHCR_TOKEN: SecretStr | None = setting(
        None, "Token for that registry, used on the head only.", "Containers", "host"
    )
    SKIP_DOWNLOAD: bool = setting(
        False, "Download no weights; they are verified all the same.", "Containers", "host"
    )
    SKIP_SYNC: bool = setting(
        False, "Copy no weights to the workers; they are verified all the same.",
        "Containers", "host",
    )  # fmt: skip
    SHARED_WEIGHTS: bool = setting(
        False, "The workers see the head's folders at the same path (NFS): copy nothing.",
        "Containers", "host",
    )  # fmt: skip
    REFRESH_WEIGHTS: bool = setting(
        False, "Ask the hub again what the revision holds.", "Containers", "host"
    )

    READY_TIMEOUT_S: int = setting(
        3600, "Seconds after which a launch that does not answer is given up.",
        "Operation", "host", ge=5, le=86_400,
    )  # fmt: skip
    STOP_GRACE_S: int = setting(
        30, "Seconds a rank may take to end by itself.", "Operation", "host", ge=1, le=600
    )
    ENGINE_COMMAND: Annotated[tuple[str, ...], BeforeValidator(split_shell)] = setting(
        (), "Command to run instead of the `vllm` of this environment.", "Operation", "host"
    )
    EXTRA_ARGS: Arguments = setting(
        (), "Further arguments of `vllm serve`; a flag that a setting owns is refused.",
        "Operation", "all ranks",
    )  # fmt: skip
    SUPERVISE: bool = setting(
        True, "Look after the launch once it is READY, and restart all ranks when it breaks.",
        "Operation", "host",
    )  # fmt: skip
    GLM_STATE_DIR: Path = setting(
        Path("~/.local/state/glm-exl3"),
        "Folder for state and logs; XDG_STATE_HOME moves its default.", "Operation", "host",
    )  # fmt: skip

    @field_validator("GLM_STATE_DIR")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    def secrets(self) -> dict[str, str]:
        """Environment variables that only the head's process may see, by name."""
        if self.VLLM_API_KEY is None:
            return {}
        return {"VLLM_API_KEY": self.VLLM_API_KEY.get_secret_value()}

    @property
    def runtime(self) -> Literal["local", "containers"]:
        """RUNTIME with `auto` decided."""
        if self.RUNTIME != "auto":
            return self.RUNTIME
        return "containers" if self.WORKER_IP or self.IMAGE or self.BUILD else "local"

    @property
    def nodes(self) -> int:
        """How many machines take part."""
        return 1 + len(self.WORKER_IP) if self.runtime == "containers" else 1

    @property
    def tensor_parallel(self) -> int:
        """Ranks in all."""
        return self.nodes * self.GPUS_PER_NODE if self.runtime == "containers" else self.RANKS

    @property
    def base_url(self) -> str:
        """The address of the API as seen from this machine, without `/v1`."""
        host = self.API_HOST
        if host in ("0.0.0.0", "::"):  # noqa: S104 (compared, not bound)
            host = "127.0.0.1" if host == "0.0.0.0" else "::1"  # noqa: S104
        return f"http://[{host}]:{self.PORT}" if ":" in host else f"http://{host}:{self.PORT}"


def group_of(field: FieldInfo) -> str:
    """The group a field belongs to."""
    return str(metadata(field)["group"])


def metadata(field: FieldInfo) -> dict[str, Any]:
    """Group, scope and `basic` of a field."""
    extra = field.json_schema_extra
    return dict(extra) if isinstance(extra, dict) else {}


def is_loopback(address: str) -> bool:
    """Whether an address can only be reached from this machine."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
