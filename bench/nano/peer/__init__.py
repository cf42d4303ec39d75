"""ExLlamaV3's own converter on our matrices: its quantiser, driven from its unpacked wheel."""
