"""The stages that an explanation can print, by name."""

STAGES = {
    "graph": "the ATen graph after our passes",
    "program": "loops and library calls",
    "plan": "kernels in order",
    "sources": "the generated kernels",
    "host": "the generated host program",
    "kernels": "every kernel with its bytes and flops",
    "calls": "library calls and fallbacks",
    "decisions": "implementations chosen by measurement, and their rivals",
    "refusals": "fusions that were refused, and why",
    "memory": "what is saved and recomputed, and memory over time",
    "times": "seconds for each stage of the compiler",
    "counters": "what was counted during the compile",
}
