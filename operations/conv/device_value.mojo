"""What a launch passes to a GPU's kernel."""

from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.reflection import reflect


trait DeviceValue(DevicePassable):
    """A value that the device sees as the host has it."""

    comptime device_type: AnyType = Self

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        """The name in messages."""
        return String(reflect[Self].base_name())
