//! Structs that start with their size, so that they can grow.

use crate::error::{Error, Result};

/// A parameter struct of the ABI: `#[repr(C)]`, every bit pattern valid, `usize` size first.
///
/// # Safety
/// The implementor is `#[repr(C)]`, its first field is the `usize` struct_size, and it is made of integers,
/// floats, raw pointers and nullable function pointers alone, so that any bytes are a value.
pub(super) unsafe trait Params: Copy {
    /// Name in messages.
    const NAME: &'static str;
    /// The size of the first published version: no caller has a smaller one.
    const MIN_SIZE: usize;
    /// Defaults; struct_size is not looked at.
    fn defaults() -> Self;
}

fn check_size<T: Params>(size: usize) -> Result<()> {
    if (T::MIN_SIZE..=4096).contains(&size) {
        return Ok(());
    }
    Err(Error::arg(
        format!("{}.struct_size", T::NAME),
        format!(
            "{size}, this library knows {} to {}: call {}_init first",
            T::MIN_SIZE,
            size_of::<T>(),
            T::NAME
        ),
    ))
}

/// Fills the caller's struct of `size` bytes with defaults.
pub(super) unsafe fn init<T: Params>(params: *mut T, size: usize) -> Result<()> {
    check_size::<T>(size)?;
    if params.is_null() {
        return Err(Error::arg(T::NAME, "NULL"));
    }
    let defaults = T::defaults();
    let known = size.min(size_of::<T>());
    // SAFETY: the header demands `size` writable bytes at `params`; `known` of them are copied from a T, the
    // rest zeroed; then the first field, a usize, is set to the size.
    unsafe {
        let bytes = params.cast::<u8>();
        std::ptr::copy_nonoverlapping((&raw const defaults).cast::<u8>(), bytes, known);
        std::ptr::write_bytes(bytes.add(known), 0, size - known);
        params.cast::<usize>().write_unaligned(size);
    }
    Ok(())
}

/// Reads the caller's struct: fields that an older caller does not have keep their defaults; fields of a newer
/// caller that this library does not know must be zero.
pub(super) unsafe fn read<T: Params>(params: *const T) -> Result<T> {
    if params.is_null() {
        return Err(Error::arg(T::NAME, "NULL"));
    }
    // SAFETY: the header demands a struct of struct_size bytes, which starts with that size.
    let size = unsafe { params.cast::<usize>().read_unaligned() };
    check_size::<T>(size)?;
    let known = size.min(size_of::<T>());
    // SAFETY: as above; `check_size` has bounded the size.
    let unknown = unsafe { std::slice::from_raw_parts(params.cast::<u8>().add(known), size - known) };
    if unknown.iter().any(|&byte| byte != 0) {
        return Err(Error::arg(
            format!("{}.struct_size", T::NAME),
            format!("{size} with fields set that this library ({} bytes) does not know", size_of::<T>()),
        ));
    }
    let mut value = T::defaults();
    // SAFETY: `known` bytes are readable and fit into a T, for which any bytes are a value.
    unsafe { std::ptr::copy_nonoverlapping(params.cast::<u8>(), (&raw mut value).cast::<u8>(), known) };
    Ok(value)
}

/// Writes the fields that the caller's struct has room for.
pub(super) unsafe fn write<T: Params>(params: *mut T, value: T) -> Result<()> {
    // SAFETY: the header demands a struct of struct_size bytes, which starts with that size.
    let size = unsafe { params.cast::<usize>().read_unaligned() };
    check_size::<T>(size)?;
    // SAFETY: as above; both have that many bytes, and `value` has the size in its first field.
    unsafe {
        let bytes = params.cast::<u8>();
        std::ptr::copy_nonoverlapping((&raw const value).cast::<u8>(), bytes, size.min(size_of::<T>()));
    }
    Ok(())
}

/// A field that is 0 or 1.
pub(super) fn flag(name: &str, value: u32) -> Result<bool> {
    match value {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(Error::arg(name, format!("{value}, it is 0 or 1"))),
    }
}

/// Reads the caller's array of structs; the first one's size is the stride of all.
pub(super) unsafe fn read_array<T: Params>(name: &str, first: *const T, n: usize) -> Result<Vec<T>> {
    if n == 0 {
        return Ok(Vec::new());
    }
    if first.is_null() {
        return Err(Error::arg(name, format!("NULL, with a count of {n}")));
    }
    // SAFETY: the header demands `n` structs, which start with their size.
    let stride = unsafe { first.cast::<usize>().read_unaligned() };
    check_size::<T>(stride)?;
    let mut all = Vec::new();
    for i in 0..n {
        // SAFETY: element `i` of the caller's array; it is `n` long.
        let element = unsafe { first.byte_add(i * stride) };
        // SAFETY: as above.
        let size = unsafe { element.cast::<usize>().read_unaligned() };
        if size != stride {
            let reason = format!("{size}, the first element's is {stride}");
            return Err(Error::arg(format!("{name}[{i}].struct_size"), reason));
        }
        // SAFETY: as above.
        all.push(unsafe { read(element) }?);
    }
    Ok(all)
}
