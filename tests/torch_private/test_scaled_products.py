import torch

from meshwright.torch_private.fake_tensors import FakeTensorMode
from meshwright.torch_private.scaled_products import scaled_mm

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def test_factors_are_multiplied_by_their_scales() -> None:
    for dtype in (E4M3, E5M2):
        a, b = torch.randn(32, 64).to(dtype), torch.randn(48, 64).to(E4M3)
        scales = {"scale_a": torch.tensor(0.5), "scale_b": torch.tensor(4.0)}
        found = scaled_mm(a, b.t(), **scales, out_dtype=torch.bfloat16, use_fast_accum=False)
        exact = a.double() @ b.double().t() * 2
        torch.testing.assert_close(found.double(), exact, rtol=2.0**-7, atol=2.0**-7)


def test_fake_tensors_know_the_result() -> None:
    with FakeTensorMode():
        a, b, one = torch.empty(32, 64, dtype=E5M2), torch.empty(48, 64, dtype=E4M3), torch.ones(())
        found = scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
    assert (found.shape, found.dtype) == ((32, 48), torch.bfloat16)
