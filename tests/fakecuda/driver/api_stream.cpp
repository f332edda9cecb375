// The driver's calls about streams and events.
#include "streams.h"

namespace {

StreamP per_thread_stream(Context &context) {
    StreamP &stream = context.per_thread[std::this_thread::get_id()];
    if (!stream) stream = driver().worker.add_stream(&context, true);
    return stream;
}

CUresult finish_stream(Lock &lock, const StreamP &stream) {
    driver().worker.finish(lock, *stream);
    return stream->context->sticky;
}

bool finished(const OpP &op) { return !op || op->done; }

} // namespace

CUresult any_stream(CUstream handle, Context &current, StreamP *stream) {
    const auto number = uintptr_t(handle);
    if (number == 0 || number == CU_STREAM_LEGACY) {
        *stream = current.legacy;
    } else if (number == CU_STREAM_PER_THREAD) {
        *stream = per_thread_stream(current);
    } else {
        *stream = driver().streams.find(handle);
    }
    if (!*stream) return CUDA_ERROR_INVALID_HANDLE;
    const Context &context = *(*stream)->context;
    return context.retained ? context.sticky : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult usable_stream(CUstream handle, Context &current, StreamP *stream) {
    if (const CUresult bad = any_stream(handle, current, stream)) return bad;
    if ((*stream)->capturing) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    const Context &context = *(*stream)->context;
    const bool legacy = *stream == context.legacy;
    return legacy && driver().worker.capturing(&context) ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : CUDA_SUCCESS;
}

FAKECUDA_EXPORT CUresult cuStreamCreate(CUstream *handle, unsigned flags) {
    return in_context(__func__, [&](Lock &, Context &context) {
        if (flags & ~CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
        Driver &driver = ::driver();
        const bool blocking = !(flags & CU_STREAM_NON_BLOCKING);
        *handle = driver.streams.add(driver.worker.add_stream(&context, blocking));
        return CUDA_SUCCESS;
    });
}

FAKECUDA_EXPORT CUresult cuStreamDestroy_v2(CUstream handle) {
    return at_any_time(__func__, [&](Lock &) {
        Driver &driver = ::driver();
        const StreamP stream = driver.streams.find(handle);
        if (!stream) return CUDA_ERROR_INVALID_HANDLE;
        driver.streams.remove(handle);
        driver.worker.destroy(stream);
        return CUDA_SUCCESS;
    });
}

FAKECUDA_EXPORT CUresult cuStreamSynchronize(CUstream handle) {
    return in_context(__func__, [&](Lock &lock, Context &context) {
        StreamP stream;
        if (const CUresult bad = usable_stream(handle, context, &stream)) return bad;
        return finish_stream(lock, stream);
    });
}

FAKECUDA_EXPORT CUresult cuStreamQuery(CUstream handle) {
    return in_context(__func__, [&](Lock &, Context &context) {
        StreamP stream;
        if (const CUresult bad = usable_stream(handle, context, &stream)) return bad;
        if (finished(stream->last)) return stream->context->sticky;
        driver().worker.ask(stream->last);
        return CUDA_ERROR_NOT_READY;
    });
}

FAKECUDA_EXPORT CUresult cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned) {
    return in_context(__func__, [&](Lock &, Context &context) {
        StreamP stream;
        if (const CUresult bad = usable_stream(handle, context, &stream)) return bad;
        const EventP event = driver().events.find(event_handle);
        if (!event) return CUDA_ERROR_INVALID_HANDLE;
        if (!finished(event->recorded)) driver().worker.push(stream, {}, {event->recorded});
        return CUDA_SUCCESS;
    });
}

FAKECUDA_EXPORT CUresult cuStreamGetCtx(CUstream handle, CUcontext *context) {
    return in_context(__func__, [&](Lock &, Context &current) {
        StreamP stream;
        if (const CUresult bad = any_stream(handle, current, &stream)) return bad;
        *context = stream->context;
        return CUDA_SUCCESS;
    });
}

FAKECUDA_EXPORT CUresult cuStreamIsCapturing(CUstream handle, int *status) {
    return in_context(__func__, [&](Lock &, Context &context) {
        StreamP stream;
        if (const CUresult bad = any_stream(handle, context, &stream)) return bad;
        if (stream == context.legacy && driver().worker.capturing(&context)) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        *status = stream->capturing;
        return CUDA_SUCCESS;
    });
}

// Just enough for a stream to be capturing: what is queued there is refused, and the graph is empty.
FAKECUDA_EXPORT CUresult cuStreamBeginCapture_v2(CUstream handle, int) {
    return in_context(__func__, [&](Lock &, Context &context) {
        StreamP stream;
        if (const CUresult bad = usable_stream(handle, context, &stream)) return bad;
        if (stream == context.legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        stream->capturing = true;
        return CUDA_SUCCESS;
    });
}

FAKECUDA_EXPORT CUresult cuStreamEndCapture(CUstream handle, CUgraph *graph) {
    return in_context(__func__, [&](Lock &, Context &context) {
        StreamP stream;
        if (const CUresult bad = any_stream(handle, context, &stream)) return bad;
        if (!stream->capturing) return CUDA_ERROR_INVALID_VALUE;
        stream->capturing = false;
        *graph = nullptr;
        return CUDA_SUCCESS;
    });
}

FAKECUDA_EXPORT CUresult cuEventCreate(CUevent *handle, unsigned) {
    return in_context(__func__, [&](Lock &, Context &context) {
        *handle = driver().events.add(std::make_shared<Event>(Event{&context, nullptr}));
        return CUDA_SUCCESS;
    });
}

FAKECUDA_EXPORT CUresult cuEventDestroy_v2(CUevent handle) {
    return at_any_time(__func__, [&](Lock &) {
        return driver().events.remove(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
    });
}

FAKECUDA_EXPORT CUresult cuEventRecord(CUevent handle, CUstream stream_handle) {
    return in_context(__func__, [&](Lock &, Context &context) {
        StreamP stream;
        if (const CUresult bad = usable_stream(stream_handle, context, &stream)) return bad;
        const EventP event = driver().events.find(handle);
        if (!event || event->context != stream->context) return CUDA_ERROR_INVALID_HANDLE;
        event->recorded = driver().worker.push(stream, {});
        return CUDA_SUCCESS;
    });
}

FAKECUDA_EXPORT CUresult cuEventSynchronize(CUevent handle) {
    return initialised(__func__, [&](Lock &lock) {
        const EventP event = driver().events.find(handle);
        if (!event) return CUDA_ERROR_INVALID_HANDLE;
        driver().worker.finish(lock, event->recorded);
        return event->context->sticky;
    });
}

FAKECUDA_EXPORT CUresult cuEventQuery(CUevent handle) {
    return initialised(__func__, [&](Lock &) {
        const EventP event = driver().events.find(handle);
        if (!event) return CUDA_ERROR_INVALID_HANDLE;
        if (finished(event->recorded)) return event->context->sticky;
        driver().worker.ask(event->recorded);
        return CUDA_ERROR_NOT_READY;
    });
}
