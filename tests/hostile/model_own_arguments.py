"""wrong result: is built of smaller arguments than Model."""

from model_reference import Model


def get_init_inputs():
    return [4, 2, 3, 2, 1]


class ModelNew(Model):
    def forward(self, x):
        return self.conv_transpose3d(x)
