//! Handles and pointers of C callers, checked before they become references.

use std::ffi::{CStr, c_char};
use std::path::Path;

use super::status::caught;
use crate::context::{Context, Slot};
use crate::error::{Error, Result};
use crate::storage::Plane;

/// A context: the KV cache of a model's sequences.
pub struct kvs_context {
    context: Context,
}

impl Tagged for kvs_context {
    const LIVE: u64 = 0x6b76_735f_6374_7831;
    const NAME: &'static str = "ctx";
}

/// The memory of a context.
pub struct kvs_memory {
    _handle: kvs_context,
}

/// The memory of a context; lives as long as the context does.
pub type kvs_memory_t = *mut kvs_memory;

/// A new handle, owned by the caller.
pub(super) fn into_handle(context: Context) -> *mut kvs_context {
    into_tagged(kvs_context { context })
}

/// Frees a handle; NULL is fine.
pub(super) unsafe fn free_handle(ctx: *mut kvs_context) -> Result<()> {
    // SAFETY: passed on.
    unsafe { free_tagged(ctx) }
}

/// Cells for the tokens of a ubatch, as kvs_slot_prepare found them.
pub struct kvs_slot {
    slot: Slot,
}

impl Tagged for kvs_slot {
    const LIVE: u64 = 0x6b76_735f_736c_7431;
    const NAME: &'static str = "slot";
}

/// A new slot handle, owned by the caller.
pub(super) fn into_slot_handle(slot: Slot) -> *mut kvs_slot {
    into_tagged(kvs_slot { slot })
}

/// The slot behind a handle.
pub(super) unsafe fn slot<'a>(slot: *const kvs_slot) -> Result<&'a Slot> {
    // SAFETY: the header demands NULL or a slot of kvs_slot_prepare that was not freed.
    unsafe { live(slot) }.map(|handle| &handle.slot)
}

/// Frees a slot; NULL is fine.
pub(super) unsafe fn free_slot(handle: *mut kvs_slot) -> Result<()> {
    // SAFETY: passed on.
    unsafe { free_tagged(handle) }
}

/// A kind of handle.
pub(super) trait Tagged {
    /// What a live one starts with; a freed one, as long as its memory is not used again, does not.
    const LIVE: u64;
    const NAME: &'static str;
}

/// What a handle points to. The tag comes first whatever the kind, so that one of another kind is told by
/// reading no more than 8 bytes of it.
#[repr(C)]
struct Tag<T> {
    tag: u64,
    value: T,
}

/// The tag of a handle that a panic left in the middle of a change.
const POISONED: u64 = 0x6b76_735f_706f_6973;

/// The tag of a handle while a call may change it: one more from a callback would change it under that call.
const IN_USE: u64 = 0x6b76_735f_7573_6564;

/// A new handle, owned by the caller.
pub(super) fn into_tagged<T: Tagged>(value: T) -> *mut T {
    Box::into_raw(Box::new(Tag { tag: T::LIVE, value })).cast()
}

/// The tag of a handle that is not NULL.
unsafe fn tag_of<T: Tagged>(handle: *mut T) -> Result<u64> {
    let handle = handle.cast::<Tag<T>>();
    if handle.is_null() || !handle.is_aligned() {
        return Err(Error::InvalidHandle { name: T::NAME });
    }
    // SAFETY: not NULL, aligned; the header demands a live handle, which begins with a tag or something as large.
    match unsafe { (&raw const (*handle).tag).read() } {
        tag if tag == T::LIVE || tag == POISONED || tag == IN_USE => Ok(tag),
        _ => Err(Error::InvalidHandle { name: T::NAME }),
    }
}

/// Runs a call on a handle; a panic in it poisons the handle.
pub(super) unsafe fn with_tagged<T: Tagged, U>(
    handle: *mut T,
    call: impl FnOnce(&mut T) -> Result<U>,
) -> Result<U> {
    // SAFETY: the header demands NULL or a live handle that no other call uses meanwhile.
    match unsafe { tag_of(handle) }? {
        POISONED => return Err(Error::Poisoned),
        IN_USE => return Err(in_use::<T>()),
        _ => {}
    }
    // SAFETY: as above, and it is of this kind; a call from a callback gets no further than the tag.
    let (tag, value) = unsafe {
        let handle = handle.cast::<Tag<T>>();
        (&raw mut (*handle).tag, &mut (*handle).value)
    };
    // SAFETY: it is in the handle, which is not freed while it is in use.
    unsafe { tag.write(IN_USE) };
    let result = caught(|| call(value));
    let is_damaged = matches!(result, Err(Error::Internal(_)));
    // SAFETY: as above.
    unsafe { tag.write(if is_damaged { POISONED } else { T::LIVE }) };
    result
}

fn in_use<T: Tagged>() -> Error {
    Error::arg(T::NAME, "in use by the call whose callback made this one")
}

/// Frees a handle; NULL is fine.
pub(super) unsafe fn free_tagged<T: Tagged>(handle: *mut T) -> Result<()> {
    if handle.is_null() {
        return Ok(());
    }
    // SAFETY: the header demands a handle that was not freed; of this kind, it came from a Box.
    unsafe {
        if tag_of(handle)? == IN_USE {
            return Err(in_use::<T>());
        }
        let handle = handle.cast::<Tag<T>>();
        (*handle).tag = 0;
        drop(Box::from_raw(handle));
    }
    Ok(())
}

/// What a handle holds, for calls that change nothing and may run side by side.
pub(super) unsafe fn live<'a, T: Tagged>(handle: *const T) -> Result<&'a T> {
    // SAFETY: the header demands NULL or a live handle that no changing call uses meanwhile.
    if unsafe { tag_of(handle.cast_mut()) }? == POISONED {
        return Err(Error::Poisoned);
    }
    // SAFETY: as above, and it is of this kind.
    Ok(unsafe { &(*handle.cast::<Tag<T>>()).value })
}

/// Runs a call that changes nothing.
pub(super) unsafe fn with_context<T>(
    ctx: *const kvs_context,
    call: impl FnOnce(&Context) -> Result<T>,
) -> Result<T> {
    // SAFETY: passed on.
    call(&unsafe { live(ctx) }?.context)
}

/// Runs a call that may change the context. A panic in the middle of a change poisons it.
pub(super) unsafe fn with_context_mut<T>(
    ctx: *mut kvs_context,
    call: impl FnOnce(&mut Context) -> Result<T>,
) -> Result<T> {
    // SAFETY: passed on.
    unsafe { with_tagged(ctx, |handle| call(&mut handle.context)) }
}

/// The caller's array; NULL only if it is empty.
pub(super) unsafe fn array<'a, T>(name: &str, ptr: *const T, len: usize) -> Result<&'a [T]> {
    if len == 0 {
        return Ok(&[]);
    }
    check_array(name, ptr, len)?;
    // SAFETY: not NULL, aligned, not larger than memory; the header demands `len` readable elements that
    // nobody changes during the call.
    Ok(unsafe { std::slice::from_raw_parts(ptr, len) })
}

/// The caller's array to write into; NULL only if it is empty.
pub(super) unsafe fn array_mut<'a, T>(name: &str, ptr: *mut T, len: usize) -> Result<&'a mut [T]> {
    if len == 0 {
        return Ok(&mut []);
    }
    check_array(name, ptr, len)?;
    // SAFETY: not NULL, aligned, not larger than memory; the header demands `len` writable elements that
    // nobody else uses during the call. Only plain numbers and bytes are written, never read first.
    Ok(unsafe { std::slice::from_raw_parts_mut(ptr, len) })
}

/// The caller's bytes for a state, or of one, in host memory; NULL only if there are none.
pub(super) unsafe fn host_bytes<'a>(name: &str, ptr: *const u8, len: usize) -> Result<&'a [u8]> {
    check_host(name, ptr, len)?;
    // SAFETY: passed on.
    unsafe { array(name, ptr, len) }
}

/// As [`host_bytes`], to write into.
pub(super) unsafe fn host_bytes_mut<'a>(name: &str, ptr: *mut u8, len: usize) -> Result<&'a mut [u8]> {
    check_host(name, ptr, len)?;
    // SAFETY: passed on.
    unsafe { array_mut(name, ptr, len) }
}

/// States go to host memory and come from there; an address of a device is easily mixed up with one.
fn check_host(name: &str, ptr: *const u8, len: usize) -> Result<()> {
    if len > 0 && Plane::is_on_device(ptr) {
        return Err(Error::arg(name, format!("{ptr:p} is memory of a device, a state is in host memory")));
    }
    Ok(())
}

fn check_array<T>(name: &str, ptr: *const T, len: usize) -> Result<()> {
    if ptr.is_null() {
        return Err(Error::arg(name, format!("NULL, with a count of {len}")));
    }
    if !ptr.is_aligned() {
        return Err(Error::arg(name, format!("{ptr:p} is not aligned to {}", align_of::<T>())));
    }
    if len.checked_mul(size_of::<T>()).is_none_or(|bytes| bytes > isize::MAX as usize) {
        return Err(Error::arg(name, format!("{len} elements do not fit in memory")));
    }
    Ok(())
}

/// A place for an out-parameter.
pub(super) unsafe fn out<'a, T>(name: &str, ptr: *mut T) -> Result<&'a mut T> {
    // SAFETY: as for `array_mut`, one element.
    let one = unsafe { array_mut(name, ptr, 1) }?;
    Ok(&mut one[0])
}

/// A NUL-terminated string.
pub(super) unsafe fn string<'a>(name: &str, ptr: *const c_char) -> Result<&'a CStr> {
    if ptr.is_null() {
        return Err(Error::arg(name, "NULL"));
    }
    // SAFETY: not NULL; the header demands a NUL-terminated string.
    Ok(unsafe { CStr::from_ptr(ptr) })
}

/// A path, in the system's encoding.
pub(super) unsafe fn path<'a>(name: &str, ptr: *const c_char) -> Result<&'a Path> {
    // SAFETY: passed on.
    let text = unsafe { string(name, ptr) }?;
    if text.is_empty() {
        return Err(Error::arg(name, "names no file"));
    }
    #[cfg(unix)]
    {
        use std::os::unix::ffi::OsStrExt;
        Ok(Path::new(std::ffi::OsStr::from_bytes(text.to_bytes())))
    }
    #[cfg(not(unix))]
    {
        text.to_str().map(Path::new).map_err(|_| Error::arg(name, "not UTF-8"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::context::ContextParams;
    use crate::memory::{KvParams, LayerParams, TensorParams};
    use crate::types::Swa;

    fn handle() -> *mut kvs_context {
        let tensor = TensorParams { ggml_type: crate::format::GgmlType::F16, n_embd: 4 };
        let kv = KvParams {
            kv_size: 4,
            layers: vec![LayerParams { k: tensor, v: None }],
            swa: Swa::NONE,
            v_trans: false,
            n_rot_k: 0,
            n_rot_v: 0,
            n_embd_head_k: 0,
            n_embd_head_v: 0,
            cell_ext: false,
            mirrors: None,
        };
        into_handle(Context::new(ContextParams::new(1, vec![kv.into()])).expect("a context"))
    }

    #[test]
    fn a_panic_in_a_changing_call_is_caught_and_poisons_the_handle() {
        let ctx = handle();
        // SAFETY: a live handle of this thread.
        unsafe {
            let failed = with_context_mut(ctx, |_| -> Result<()> { panic!("cells do not add up") });
            assert_eq!(failed.unwrap_err().to_string(), "internal error: cells do not add up");
            assert!(matches!(with_context_mut(ctx, |_| Ok(())), Err(Error::Poisoned)));
            assert!(matches!(with_context(ctx, |_| Ok(())), Err(Error::Poisoned)));
            free_handle(ctx).expect("free works");
        }
    }

    #[test]
    fn an_error_does_not_poison_the_handle() {
        let ctx = handle();
        // SAFETY: a live handle of this thread.
        unsafe {
            assert!(with_context_mut(ctx, |context| context.seq_keep(7)).is_err());
            assert!(with_context_mut(ctx, |context| context.seq_keep(0)).is_ok());
            free_handle(ctx).expect("free works");
        }
    }

    #[test]
    fn a_handle_of_another_kind_is_refused() {
        let ctx = handle();
        // SAFETY: a live handle of this thread; its tag is put back before it is freed.
        unsafe {
            let tag = ctx.cast::<u64>();
            tag.write(7);
            assert!(matches!(with_context(ctx, |_| Ok(())), Err(Error::InvalidHandle { name: "ctx" })));
            assert!(matches!(free_handle(ctx), Err(Error::InvalidHandle { name: "ctx" })));
            tag.write(kvs_context::LIVE);
            free_handle(ctx).expect("free works");
        }
    }
}
