"""Hold transformers under context parallelism against plain PyTorch, on four ranks; draw the table of the docs.

python benchmarks/context_table.py --json docs/data/context.json --page docs/strategies/context.md
python benchmarks/context_table.py --models GPT --strategies cp=2

GPT is that of examples/gpt.py in a smaller size, BERT's samples are padded, Gemma 2 has sliding windows, and ViT has 17
tokens. The reference is a plain loop over the model, in float64 where it runs so. A verdict is "=" (equal), "r"
(refused by an error that says why), "DIFFERS" or "CRASH". With --json a run goes on where an earlier one ended. Exit 1
if anything differs or crashes.
"""

from plain_matrix import Matrix, widest_case

MATRIX = Matrix(
    models=("GPT", "Llama", "Qwen3", "Gemma 2", "BERT", "ViT"),
    strategies=("cp=2", "cp=4", "cp=2,fsdp", "cp=2,tp=2", "cp=2,pp=2:1f1b"),
    case=lambda name: widest_case("context_programs", name),
    ranks=lambda strategy: 4,
    packages=("torch", "transformers"),
)

if __name__ == "__main__":
    MATRIX.main(__doc__)
