"""One line converts a PyTorch model; parameters, buffers and state stay. ``python examples/call_torch.py``"""

import copy

import torch

import pybnorm.torch

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.LazyLinear(10)
)
x, target = torch.randn(8, 3, 14, 14), torch.randint(10, (8,))
model(x)  # makes the lazy layer
ours = pybnorm.torch.convert(copy.deepcopy(model))
print(type(model[1]).__module__, "->", type(ours[1]).__module__)

for network in (model, ours):
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(network(x), target)
        loss.backward()
        optimizer.step()
    print(f"loss after five steps: {loss.item():.6f}")
same = model.state_dict().keys() == ours.state_dict().keys()
print("the same state keys:", same)
