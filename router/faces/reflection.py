"""gRPC server reflection, v1 and v1alpha. The two differ only in the name of their package."""

from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf import descriptor_pool, json_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha import reflection_pb2 as pb

V1ALPHA = reflection.SERVICE_NAME
V1 = V1ALPHA.replace("v1alpha", "v1")


def handlers(services: Sequence[str]) -> "tuple[grpc.GenericRpcHandler[Any, Any], ...]":
    """Handlers of both versions, for a grpc.aio server.

    Args:
        services: full names of the services that reflection lists besides its own.
    """
    _describe_v1()
    services = (*services, V1ALPHA, V1)
    servicer = reflection.aio.ReflectionServicer(services)  # type: ignore[attr-defined]  # its __all__ is in an `if`
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        pb.ServerReflectionRequest.FromString,
        pb.ServerReflectionResponse.SerializeToString,
    )
    return tuple(grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": method}) for name in (V1ALPHA, V1))


def _describe_v1() -> None:
    """Adds v1 to the descriptors of this process, so that it can be described like any other service."""
    v1alpha = FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(v1alpha)
    text: str = json_format.MessageToJson(v1alpha)
    v1 = json_format.Parse(text.replace("v1alpha", "v1"), FileDescriptorProto())
    pool = descriptor_pool.Default()
    try:
        pool.FindFileByName(v1.name)
    except KeyError:
        pool.AddSerializedFile(v1.SerializeToString())
