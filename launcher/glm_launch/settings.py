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
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    field_validator,
)
from pydantic.fields import FieldInfo

from glm_launch.parsing import (
    extra_arguments,
    host_address,
    multimodal_limits,
    split_list,
    split_shell,
)

Group = Literal[
    "Model", "Drafting", "API", "Nodes", "Capacity", "Images and video", "Containers", "Operation"
]
Scope = Literal["host", "head", "all ranks"]


def setting(
    default: Any, help_text: str, group: Group, scope: Scope, *, basic: bool = False, **limits: Any
) -> Any:
    """A field with its help, group and scope; `basic` ones are active in .env.example."""
    extra: dict[str, Any] = {"group": group, "scope": scope, "basic": basic}
    return Field(default, description=help_text, json_schema_extra=extra, **limits)


Address = Annotated[str, AfterValidator(host_address)]
Addresses = Annotated[tuple[Address, ...], BeforeValidator(split_list)]
Size = Annotated[int, Field(ge=1, le=8192)]
Sizes = Annotated[tuple[Size, ...], BeforeValidator(split_list)]
Limits = Annotated[dict[str, int], BeforeValidator(multimodal_limits)]
Arguments = Annotated[tuple[str, ...], BeforeValidator(extra_arguments)]
ServedName = Annotated[str, Field(pattern=r"^[\w.:/+-]+$")]
Port = Annotated[int, Field(ge=1, le=65535)]


class Settings(BaseModel):
    """The validated settings of one command; frozen."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", str_strip_whitespace=True, hide_input_in_errors=True
    )

    MODEL: str = setting("", "Folder of the EXL3 checkpoint.", "Model", "all ranks", basic=True)
    MODEL_REVISION: str = setting(
        "", "Revision to pin when MODEL is a hub repository.", "Model", "all ranks"
    )
    SERVED_MODEL_NAME: ServedName = setting(
        "GLM-5.3-Flash-EXL3", "Name of the model in the API.", "Model", "head"
    )
    HF_HOME: str = setting("", "Hub cache; empty: the hub's own default.", "Model", "all ranks")

    SPEC_METHOD: Literal["dflash", "mtp", "none"] = setting(
        "dflash",
        "Drafting: dflash (needs DFLASH_MODEL), mtp (the checkpoint's own head) or none. "
        "The demo drafts only when this is set.",
        "Drafting", "all ranks", basic=True,
    )  # fmt: skip
    DFLASH_MODEL: str = setting(
        "", "Folder of the DFlash2 drafter.", "Drafting", "all ranks", basic=True
    )
    DFLASH_REVISION: str = setting(
        "", "Revision to pin when DFLASH_MODEL is a hub repository.", "Drafting", "all ranks"
    )
    DFLASH_TOKENS: int = setting(
        7, "Tokens DFlash2 drafts per step.", "Drafting", "all ranks", ge=1, le=15
    )
    DFLASH_DRAFT_TP: int = setting(
        0, "Tensor parallelism of the drafter: 1, or that of the target; 0: that of the target.",
        "Drafting", "all ranks", ge=0, le=8,
    )  # fmt: skip
    MTP_TOKENS: int = setting(
        2, "Tokens the MTP head drafts per step.", "Drafting", "all ranks", ge=1, le=8
    )

    PORT: Port = setting(8888, "Port of the OpenAI-compatible API.", "API", "head", basic=True)
    API_HOST: Address = setting(
        "127.0.0.1", "Address the API listens on. Anything but loopback needs a key.",
        "API", "head", basic=True,
    )  # fmt: skip
    VLLM_API_KEY: SecretStr | None = setting(
        None, "Key that clients must send; empty: none.", "API", "head", basic=True
    )
    ALLOW_OPEN_API: bool = setting(False, "Listen beyond loopback without a key.", "API", "head")

    RUNTIME: Literal["local"] = setting(
        "local", "How ranks run. local: as processes on this machine.", "Nodes", "host"
    )
    RANKS: Annotated[Literal[1, 2, 4], BeforeValidator(int)] = setting(
        2, "Ranks of RUNTIME=local; also the tensor parallelism.", "Nodes", "host"
    )
    HEAD_IP: Address = setting(
        "127.0.0.1", "Address of the head on the network between the ranks.", "Nodes", "all ranks"
    )
    WORKER_IP: Addresses = setting(
        (), "Addresses of the worker nodes, separated by commas; empty: all ranks run here.",
        "Nodes", "host",
    )  # fmt: skip
    WORKER_USER: str = setting("", "User name on the worker nodes.", "Nodes", "host")
    MASTER_PORT: Port = setting(
        29521, "Port where the ranks meet. Nothing authenticates it: keep it off other networks.",
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
    KV_CACHE_DTYPE: Literal["auto", "bfloat16", "fp8"] = setting(
        "auto", "Type of the KV cache.", "Capacity", "all ranks"
    )
    KV_CACHE_MEMORY_BYTES: int = setting(
        0, "Bytes of KV cache per rank, instead of GPU_MEM_UTIL; 0: computed.",
        "Capacity", "all ranks", ge=0, le=2**40,
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

    LANGUAGE_MODEL_ONLY: bool = setting(False, "Serve text only.", "Images and video", "all ranks")
    LIMIT_MM: Limits = setting(
        {}, "Items per prompt, such as image=8,video=1; empty: vLLM's choice.",
        "Images and video", "all ranks",
    )  # fmt: skip
    SKIP_MM_PROFILING: bool = setting(
        True, "Reserve no memory for the largest image at start.", "Images and video", "all ranks"
    )

    IMAGE: str = setting("", "Container image.", "Containers", "all ranks")
    BUILD: bool = setting(False, "Build the image instead of pulling it.", "Containers", "host")
    SKIP_PULL: bool = setting(False, "Use the image that is there.", "Containers", "host")
    SKIP_DOWNLOAD: bool = setting(False, "Download no weights.", "Containers", "host")
    SKIP_SYNC: bool = setting(False, "Copy no weights to the workers.", "Containers", "host")
    REFRESH_WEIGHTS: bool = setting(
        False, "Ask the hub for a newer revision.", "Containers", "host"
    )
    ABLIT: bool = setting(False, "Apply the opt-in weight edits.", "Containers", "all ranks")

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
