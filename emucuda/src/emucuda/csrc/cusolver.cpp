// libcusolver.so.12: the handle. Factorisations and their workspaces are generated; see NOTE [info] and
// NOTE [workspaces of factorisations] in handles.h.
#include "handles.h"

using namespace emucuda;

extern "C" {
int cusolverDnCreate(void** handle) { return make<Handle>(handle); }
int cusolverDnDestroy(Handle* handle) { return delete handle, 0; }
int cusolverDnSetStream(Handle* handle, void* stream) { return handle->stream = stream, 0; }
int cusolverDnGetStream(Handle* handle, void** stream) { return *stream = handle->stream, 0; }
}
